"""`statekit convert`: a checkpoint of one system becomes one of another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from statekit.cli import output
from statekit.cli.arguments import (
    CHANGES,
    OUTPUT,
    SAFETY,
    Page,
    about_checkpoint,
    certificate_place,
    changes_options,
    complete_layouts,
    complete_maps,
    complete_targets,
    local_file,
    read_config,
    read_size,
    read_step,
    ref_options,
    source_place,
    with_more,
    written_place,
)
from statekit.cli.main import DONE, WANTING
from statekit.cli.output import Screen
from statekit.cli.plan_view import show_brief, show_measured, show_next, show_plan
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Exactness
from statekit.conversion.convert import Report, check_place, convert, outcome, plan
from statekit.conversion.plan import Plan
from statekit.conversion.resume import module_map, of_plan, resume_lines, unsaid
from statekit.conversion.target import NAME_IT
from statekit.errors import StatekitError, UnknownRuleError, UsageError, printable, size
from statekit.files.source import checkpoint_place
from statekit.files.stage import Progress
from statekit.files.tree import Place
from statekit.maps.links import StateMap

if TYPE_CHECKING:  # entered only where something is asked for
    from statekit.conversion.changing.changes import Changes
    from statekit.verify.certificate import Certificate

PHASES = {"check": "checking the source", "write": "writing", "verify": "reading again"}


def _renaming(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for text in value:
        pattern, equals, replacement = text.partition("=")
        if not pattern or not equals:
            raise click.BadParameter(f"{text!r} isn't PATTERN=REPLACEMENT.")
        pairs[pattern] = replacement
    return pairs


def _maps(
    name: str | None, config: tuple[str, ...], rename: dict[str, str], hints: CheckpointRef
) -> tuple[tuple[StateMap, ...], dict[str, Any]]:
    """Returns the maps that the user asks for, and the options as the user gave them."""
    if name is None and not config and not rename:
        return (), {}
    from statekit.files.source import Files
    from statekit.maps.model_map import maps_of

    with Files(hints.job_budget()) as files:
        settings = read_config(config, name, files)
    maps = maps_of(name, settings, rename, budget=hints.job_budget())
    return maps, {"map": name, "config": settings, "rename": rename}


_SOURCE, _TARGET = "What SOURCE is", "What TARGET becomes"
WORKERS = "Many workers"
_EVERYDAY = {
    _SOURCE: ("container", "step", "hparams", "param_names"),
    _TARGET: ("to", "layout", "map_name", "config", "step_offset", "params_only"),
    SAFETY: ("dry_run", "require", "replace", "proves"),
    OUTPUT: ("explain", "quiet", "as_json", "help", "help_all"),
}
_MORE = {
    _TARGET: (*CHANGES, "rename", "like"),
    SAFETY: ("replace_foreign", "certificate"),
    OUTPUT: ("threads",),
    WORKERS: ("on", "task_bytes", "work"),
}


_OF_PLANS = (
    click.argument("source", type=click.Path(), callback=source_place),
    click.argument("target", type=click.Path(), callback=written_place),
    click.option(
        "--to",
        metavar="CONTAINER",
        shell_complete=complete_targets,
        help="The target's container, if its name does not say it.",
    ),
    click.option(
        "--layout",
        metavar="LAYOUT",
        shell_complete=complete_layouts,
        help="The layout of the target's optimizer.",
    ),
    ref_options("source", without=["layout"], help={"container": "The source's container, if not detected."}),
    click.option(
        "--step-offset",
        metavar="keep|reset|N",
        callback=read_step,
        default="keep",
        show_default=True,
        help="The start of the second moment's decay. reset: now, for finetuning.",
    ),
    changes_options,
    click.option(
        "--require",
        type=click.Choice([e.name.lower() for e in Exactness if e < Exactness.REFUSED]),
        default=Exactness.ROUNDING.name.lower(),
        show_default=True,
        help="The lowest exactness allowed.",
    ),
    click.option(
        "--like",
        metavar="FILE",
        type=click.Path(),
        callback=local_file,
        help="A file that Keras saved of the same model, trained or not. The target takes the order of its parameters.",
    ),
    click.option(
        "--map",
        "map_name",
        metavar="SOURCE:TARGET|FILE",
        shell_complete=complete_maps,
        help="The map between two codebases' models: t5x-t5:hf-t5, or a .json file of your own.",
    ),
    click.option(
        "--config",
        multiple=True,
        metavar="FILE|KEY=VALUE",
        help="The model's sizes, which the map needs: num_heads=12, or its config.json. May be repeated.",
    ),
    click.option(
        "--rename",
        multiple=True,
        metavar="PATTERN=REPLACEMENT",
        callback=_renaming,
        help="Rename parameters by a regular expression, before the map. May be repeated.",
    ),
)


_FLAGS = {"dry_run": "--dry-run", "replace": "--replace", "replace_foreign": "--replace-foreign"}
_FLAGS |= {"proves": "--verify", "as_json": "--json"}


@dataclass(frozen=True)
class Asked:
    """A user's request for a conversion, before there is a plan.

    Attributes:
        ref: The source.
        target: The target.
        options: What else `plan` takes.
        map_name: The map's name, or its file; None without one.
        config: What the map is told, as it was said.
    """

    ref: CheckpointRef
    target: Place
    options: Mapping[str, Any]
    map_name: str | None
    config: tuple[str, ...]

    def plan(self) -> Plan:
        """Returns the plan; a remedy that repeats the command gets the flags that a plan doesn't know."""
        try:
            return plan(self.ref, self.target, **self.options)
        except UnknownRuleError as error:
            params = click.get_current_context().params
            words = "".join(f" {flag}" for name, flag in _FLAGS.items() if params.get(name))
            error.rename(lambda text: f"{text}{words}" if text.startswith(NAME_IT) else text)
            raise


def asks_for_a_plan(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the arguments and options of a plan; the command gets them as one `Asked`."""

    @functools.wraps(command)
    def run(ref: CheckpointRef, target: Place, **options: Any) -> Any:
        asked = {name: options.pop(name) for name in ("to", "layout", "step_offset", "like", "changes")}
        asked["require"] = Exactness[options.pop("require").upper()]
        map_name, config, rename = (options.pop(name) for name in ("map_name", "config", "rename"))
        asked["maps"], asked["map_options"] = _maps(map_name, config, rename, ref)
        return command(asked=Asked(ref, target, asked, map_name, config), **options)

    for option in reversed(_OF_PLANS):
        run = option(run)
    return run


@click.command(
    "convert",
    cls=Page,
    everyday=_EVERYDAY,
    more=with_more(_EVERYDAY, about_checkpoint(_SOURCE), _MORE),
    examples=(
        "statekit convert t5x-ckpt torch-ckpt",
        "statekit convert t5x-ckpt finetune.pt --step-offset reset",
        "statekit convert trainer-run optax-run --to orbax --layout optax --dry-run",
    ),
)
@asks_for_a_plan
@click.option(
    "--dry-run", is_flag=True, help="Show the plan, tensor by tensor, and whether TARGET's place is free."
)
@click.option("--replace", is_flag=True, help="Replace a target that statekit wrote.")
@click.option("--replace-foreign", is_flag=True, help="Replace any file or folder.")
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    metavar="N",
    help="The number of threads. Default: the number of cores; 1 in a dry run.",
)
@click.option(
    "--task-bytes",
    metavar="SIZE",
    callback=read_size,
    help="The most bytes of values in a file of TARGET, and in a task of --on: 5GB. Default: the "
    "container's; 2GiB with --on.",
)
@click.option(
    "--on",
    metavar="ENGINE",
    help="Convert by many workers: processes:N, ray, ray://HOST:PORT or slurm. The same command continues "
    "an interrupted conversion.",
)
@click.option(
    "--work",
    metavar="FOLDER",
    type=click.Path(),
    callback=source_place,
    help="The folder that the workers of --on share, on TARGET's disk or in its bucket. Default: TARGET.work.",
)
@click.option("--verify", "proves", is_flag=True, help="Prove afterwards that TARGET continues the same run.")
@click.option(
    "--certificate",
    metavar="FILE.json",
    type=click.Path(path_type=Path),
    callback=certificate_place,
    help="Write the result of --verify into this file.",
)
@click.option("--explain", is_flag=True, help="Print every fact of the conversion with its reason.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    asked: Asked,
    dry_run: bool,
    replace: bool,
    replace_foreign: bool,
    threads: int | None,
    task_bytes: int | None,
    on: str | None,
    work: Place | None,
    proves: bool,
    certificate: Path | None,
    explain: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Converts a checkpoint to another system.

    SOURCE is a checkpoint of any system, or a run's folder. --to, TARGET's suffix (.pt), or a word in its name
    (torch-ckpt, t5x-ckpt) chooses the target's container. TARGET appears once it is written, read again and compared.
    """
    _check_proof(asked.options["changes"], dry_run, proves, certificate)
    planned = asked.plan()
    if dry_run:
        _say_if_refused(planned, replace, replace_foreign)
        report = None
    elif on is not None:
        from statekit.cli.work.view import carried_out_on

        _check_on(replace or replace_foreign, threads)
        report = carried_out_on(planned, on, work, task_bytes, quiet)
        if report is None:  # submitted: it isn't done yet
            return DONE
    else:
        report = _carry_out(planned, replace, replace_foreign, threads, quiet, task_bytes)
        _debug_times(report)
    proof = _proven(planned, asked.map_name, asked.config, certificate) if proves else None
    if as_json:
        data = outcome(planned, report)
        output.print_json("convert", data if proof is None else {**data, "certificate": proof.to_json()})
    elif not quiet:
        _show(output.screen(), planned, report, explain)
        _show_proof(proof, certificate)
    return DONE if proof is None or proof.passed else WANTING


def _check_on(replaces: bool, threads: int | None) -> None:
    """Refuses options that many workers don't have."""
    if replaces or threads is not None:
        raise UsageError(
            "Many workers write a new target, each with threads of its own.",
            place="--on",
            found="--replace or --replace-foreign" if replaces else "--threads",
            remedy="choose another name" if replaces else "name the number of workers: --on processes:N",
        )


def _check_proof(changes: Changes | None, dry_run: bool, proves: bool, certificate: Path | None) -> None:
    """Refuses options of a proof that can't be made."""
    if (dry_run and proves) or (certificate is not None and not proves):
        raise click.UsageError("--certificate needs --verify, and --verify needs a written target.")
    if proves and changes is not None and (changes.state_only or changes.init_missing is not None):
        raise UsageError(
            "--verify cannot prove such a conversion.",
            place="--state-only" if changes.state_only else "--init-missing",
            expected="parameters that are the source's, in both",
            remedy="leave --verify out",
        )


def _debug_times(report: Report) -> None:
    """Prints on stderr, with --debug, how long each stage worked."""
    if report.times and click.get_current_context().find_root().params.get("debug"):
        click.echo("\n".join(report.times.lines()), err=True)


def _show_proof(proof: Certificate | None, certificate: Path | None) -> None:
    """Prints what --verify shows."""
    if proof is None:
        return
    from statekit.cli.verify_command import show

    output.screen().say()
    show(proof, certificate)


def _show(stdout: Screen, planned: Plan, report: Report | None, explain: bool) -> None:
    """Prints what was done in short, or all that is known of it; a dry run is asked for all."""
    if report is None or explain:
        show_plan(stdout, planned, tensors=report is None)
        if planned.next_update:
            show_measured(stdout, planned.next_update, planned.run.schedules)
        else:
            show_next(stdout, planned.state, planned.run.schedules)
    else:
        show_brief(stdout, planned, report)
    if report is not None:
        _show_report(stdout, report, explain)


def _proven(
    planned: Plan, map_name: str | None, config: tuple[str, ...], certificate: Path | None
) -> Certificate:
    """Returns what verifying the target shows; it is written to a file if one is named."""
    from statekit.cli.verify_command import verified

    request = planned.request
    proof = verified(
        request.ref,
        checkpoint_place(f"{request.target}"),  # as it is now
        config,
        require=request.require,
        map=map_name,
        step_offset=request.step_offset,
    )
    if certificate is not None:
        proof.save(certificate)
    return proof


def _say_if_refused(planned: Plan, replace: bool, replace_foreign: bool) -> None:
    """Prints on stderr why what a dry run plans would not be written in the target's place."""
    try:
        check_place(planned, replace, replace_foreign)
    except StatekitError as error:
        click.echo(f"Note: this would be refused: {printable(error.line)}", err=True)


def _carry_out(
    planned: Plan,
    replace: bool,
    replace_foreign: bool,
    threads: int | None,
    quiet: bool,
    task_bytes: int | None,
) -> Report:
    with output.progress(needed=not quiet) as bar:
        task, phase = bar.add_task("", total=None), ""

        def tell(progress: Progress) -> None:
            nonlocal phase
            if progress.phase != phase:
                phase = progress.phase
                bar.reset(task, description=PHASES[phase])
            bar.update(task, completed=progress.done, total=progress.total or None)

        return convert(
            planned,
            replace=replace,
            replace_foreign=replace_foreign,
            threads=threads,
            on_progress=tell,
            task_bytes=task_bytes,
        )


def _show_report(stdout: Screen, report: Report, explain: bool) -> None:
    """Prints how to go on; with `explain`, what was written and measured first."""
    if explain:
        speed = size(round(report.plan.bytes / report.seconds)) if report.seconds else "-"
        stdout.say()
        stdout.say(
            f"Wrote {report.plan.request.target}: {size(report.bytes)} in {report.seconds:.1f} s ({speed}/s); "
            f"{report.verified} tensors read again and found as meant."
        )
        stdout.show_list("Measured:", map(str, report.measured))
    stdout.title("To go on from here:")
    place = of_plan(report.plan, report.files)
    for line in resume_lines(place, report.plan.state) or [unsaid(place)]:
        stdout.say(line, indent=2, fold=False)
    source, target = ((side.container, side.layout) for side in (report.plan.source, report.plan.target))
    if (pair := module_map(source, target)) and not report.plan.options.get("maps"):
        stdout.say(f"The names are still the source's; --map {pair} gives those of the same modules there.")
