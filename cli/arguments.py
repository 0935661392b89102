"""Arguments that several verbs share, and the names that a shell may complete."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from statekit.budget import bytes_of
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.errors import Faults, NotFoundError, TargetExistsError, UsageError, printable
from statekit.state.train_state import StepOffset

if TYPE_CHECKING:  # entered only where an option names a file
    from statekit.files.source import Files

FOLLOW_LINKS = (
    "Read what links out of the checkpoint lead to; those in Hugging Face's cache are followed anyway."
)
"""What the option of that name does, as the help of each verb says it."""

Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def completing(names: Callable[[], Iterable[str]]) -> Complete:
    """Returns what completes one of the names."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def _containers() -> Iterable[str]:
    from statekit.conversion.registry import container_names

    return container_names()


def _targets() -> Iterable[str]:
    from statekit.conversion.target import target_names

    return target_names()


def _layouts() -> Iterable[str]:
    from statekit.conversion.registry import layout_names

    return layout_names()


def _maps() -> Iterable[str]:
    from statekit.maps.model_map import map_names

    return map_names()


def _variants() -> Iterable[str]:
    from statekit.state.schema import load_schema, schema_names

    return sorted({variant for name in schema_names() for variant in load_schema(name).variants})


complete_containers, complete_targets = completing(_containers), completing(_targets)
complete_layouts, complete_variants = completing(_layouts), completing(_variants)
complete_maps = completing(_maps)


step_option = click.option(
    "--step", type=int, metavar="N", help="The step of a run's folder. Default: the newest."
)


def from_option(parameter: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns the option that names the container of what is read; the command gets it as `parameter`."""
    return click.option(
        "--from", parameter, metavar="CONTAINER", shell_complete=complete_containers, help=text
    )


def checkpoint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds CHECKPOINT, and the options that say what it is and what it doesn't say.

    The command gets `checkpoint`, `container`, `layout`, `step` and `hints`.
    """
    added = (
        click.argument("checkpoint", type=click.Path(), callback=local_file),
        from_option("container", "What the file is, if it can't be told."),
        click.option(
            "--layout",
            metavar="LAYOUT",
            shell_complete=complete_layouts,
            help="What its names mean, if it can't be told.",
        ),
        step_option,
        hints_options,
    )
    return functools.reduce(lambda made, add: add(made), reversed(added), command)


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    return None if value is None else bytes_of(value)


_follow_links_option = click.option("--follow-links", is_flag=True, help=FOLLOW_LINKS)
budget_option = click.option(
    "--budget",
    metavar="SIZE",
    callback=_size,
    help="How much memory headers, pickles and trees may take, such as 2GiB, and work in proportion; values of "
    "tensors stream.  [default: 512MiB]",
)


def checkpoints_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds CHECKPOINT..., of which each may be several, and what their bytes are read by.

    The command gets `checkpoints`, `container`, `step`, `follow_links` and `budget`.
    """
    added = (
        click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True, callback=local_files),
        from_option("container", "What the files are, if it can't be told."),
        click.option("--step", type=int, metavar="N", help="One step of a run's folder. Default: all."),
        _follow_links_option,
        budget_option,
    )
    return functools.reduce(lambda made, add: add(made), reversed(added), command)


def local_files(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Path, ...]:
    """Turns arguments into paths of this machine, as `local_file` does."""
    return tuple(path for value in values if (path := local_file(ctx, param, value)) is not None)


def hints_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that say what a checkpoint doesn't; the command gets `hints`."""

    @click.option(
        "--hparams",
        multiple=True,
        metavar="FILE|KEY=VALUE",
        help="What the checkpoint doesn't say, by the original's own names: decay_rate=0.8, or a .gin or .json file. "
        "May be repeated. adamw/b2=0.95 is of one of several optimizers.",
    )
    @click.option(
        "--schedule",
        metavar="CALL|FILE",
        help="What makes the run's learning rate, where its files don't say it, as the program has it: "
        "'optax.cosine_decay_schedule(1e-3, 10000)', or a .gin file of T5X.",
    )
    @click.option(
        "--variant",
        metavar="NAME",
        shell_complete=complete_variants,
        help="Which variant of the optimizer ran, where the files can't tell; of several: adafactor/hf,adamw/torch.",
    )
    @click.option(
        "--param-names",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Names in the order of the optimizer's parameters, where it only numbers them: one per line, a JSON list "
        "(or one for each group), or a file with a state_dict.",
    )
    @click.option(
        "--names-from",
        type=click.Choice(["config"]),
        help="Where to take the order of a Trainer's numbered parameters from; config: the architecture that the "
        "model's config.json names, built without weights (needs statekit[hf]).",
    )
    @click.option(
        "--model-key",
        metavar="KEY",
        help="Where the weights lie in a PyTorch file or a tree of JAX, keys joined by /, if several may be meant.",
    )
    @click.option(
        "--optimizer-key", metavar="KEY", help="Where the optimizer's state lies in a PyTorch file."
    )
    @click.option(
        "--accept-damaged",
        is_flag=True,
        help="Go on with a checkpoint that its manifest contradicts; says what does.",
    )
    @_follow_links_option
    @budget_option
    @functools.wraps(command)
    def run(
        *args: Any,
        hparams: tuple[str, ...],
        schedule: str | None,
        variant: str | None,
        param_names: Path | None,
        names_from: str | None,
        model_key: str | None,
        optimizer_key: str | None,
        accept_damaged: bool,
        follow_links: bool,
        budget: int | None,
        **options: Any,
    ) -> Any:
        hints = CheckpointRef(
            model_key=model_key,
            optimizer_key=optimizer_key,
            names_from=names_from,
            accept_damaged=accept_damaged,
            follow_links=follow_links,
            budget=budget,
        )
        hints = _with_said(hints, hparams, variant, param_names, schedule)
        return command(*args, hints=hints, **options)

    return run


SIDES = {"left": "A", "right": "B"}
"""What begins the options of one of two checkpoints -> how its argument is called."""


def sides_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that say of one of two checkpoints what it doesn't, below `hints_options`.

    The command gets `hints` as those of each: what is said of one side goes before what is said of both.
    """

    @functools.wraps(command)
    def run(*args: Any, hints: CheckpointRef, **options: Any) -> Any:
        each = []
        for side in SIDES:
            hparams, variant, names, schedule = (
                options.pop(f"{side}_{name}") for name in ("hparams", "variant", "param_names", "schedule")
            )
            each.append(_with_said(hints, hparams, variant, names, schedule))
        return command(*args, hints=tuple(each), **options)

    for side, of in SIDES.items():
        for option in (
            click.option(
                f"--{side}-hparams",
                multiple=True,
                metavar="FILE|KEY=VALUE",
                help=f"As --hparams, of {of} alone.",
            ),
            click.option(
                f"--{side}-variant",
                metavar="NAME",
                shell_complete=complete_variants,
                help=f"As --variant, of {of} alone.",
            ),
            click.option(
                f"--{side}-param-names",
                type=click.Path(path_type=Path),
                metavar="FILE",
                help=f"As --param-names, of {of} alone.",
            ),
            click.option(f"--{side}-schedule", metavar="CALL|FILE", help=f"As --schedule, of {of} alone."),
        ):
            run = option(run)
    return run


def read_step(ctx: click.Context, param: click.Parameter, value: str) -> StepOffset:
    """Turns `keep`, `reset` or a number into a place in a count; a callback for click."""
    if value in STEPS:
        return STEPS[value]
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither keep, reset nor a number.") from None


STEPS: dict[str, StepOffset] = {"keep": "keep", "reset": "reset"}


def changes_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that say what shall be changed of a run; the command gets `changes`, None if nothing is."""

    @click.option(
        "--schedule-step",
        metavar="keep|reset|N",
        callback=read_step,
        default="keep",
        show_default=True,
        help="Where the learning-rate schedule stands; reset: at its beginning.",
    )
    @click.option(
        "--slot-policy",
        multiple=True,
        metavar="keep|drop:SLOT|reset:SLOT",
        help="What becomes of slots, by canonical name: reset:v begins it anew, drop:m leaves it behind where the rule "
        "goes on without it; 'reset:v*' is all that fit, reset:count the updates done. May be repeated.",
    )
    @click.option("--params-only", is_flag=True, help="Leave the optimizer behind.")
    @click.option(
        "--state-only", is_flag=True, help="Leave the parameters behind: an optimizer's state of PyTorch."
    )
    @click.option(
        "--drop-slots-of",
        multiple=True,
        metavar="GLOB",
        help="Freeze parameters: they keep their values, their slots are left behind. May be repeated.",
    )
    @click.option(
        "--param-dtype",
        metavar="DTYPE",
        help="The dtype of parameters. A narrower one rounds them; the report says how far they are off.",
    )
    @click.option(
        "--slot-dtype",
        multiple=True,
        metavar="[SLOT=]DTYPE",
        help="The dtype of slots, of one or of all that aren't counts, as far as the target's rule keeps it.",
    )
    @click.option(
        "--loss-scale",
        type=float,
        metavar="C",
        help="How many times as large the loss is from now on: 1/tokens from a sum to a mean. Moments are rescaled.",
    )
    @click.option(
        "--init-missing",
        metavar="FILE",
        type=click.Path(),
        callback=local_file,
        help="A file of the target's model: parameters that it has and the source lacks, or has in another shape, are "
        "taken from it, and their slots begin anew.",
    )
    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        said = {name: options.pop(name) for name in CHANGES}
        unsaid = ("keep", ())  # and False and None themselves: 0 equals False, and is a step
        said = {
            name: value
            for name, value in said.items()
            if value is not False and value is not None and value not in unsaid
        }
        changes = None
        if said:
            from statekit.conversion.changing.changes import Changes

            changes = Changes.of(said)
        return command(*args, changes=changes, **options)

    return run


CHANGES = (
    "schedule_step",
    "slot_policy",
    "params_only",
    "state_only",
    "drop_slots_of",
    "param_dtype",
    "slot_dtype",
    "loss_scale",
    "init_missing",
)


def _with_said(
    hints: CheckpointRef,
    hparams: tuple[str, ...],
    variant: str | None,
    param_names: Path | None,
    schedule: str | None,
) -> CheckpointRef:
    """Returns hints with what options say too, which goes before; files that they name draw on the job's budget."""
    if variant is not None:
        hints = replace(hints, variant=variant)
    if not hparams and param_names is None and schedule is None:
        return hints
    from statekit.files.source import Files

    with Files(hints.job_budget()) as files:
        if param_names is not None:
            from statekit.cli.param_names import read_param_names

            hints = replace(hints, param_names=read_param_names(param_names, files))
        if schedule is not None:
            hints = replace(hints, schedule=_schedule(schedule, files))
        if hparams:
            hints = replace(hints, hparams={**hints.hyperparameters, **said_hparams(hparams, files)})
    return hints


def said_hparams(arguments: tuple[str, ...], files: Files) -> Mapping[str, Any]:
    """Returns what `--hparams` says, and prints on stderr what of its files can't be read."""
    from statekit.converters.formats.hparams import read_hparams

    settings = read_hparams(arguments, files=files)
    for note in settings.left_out:
        click.echo(f"Note: {printable(note)}", err=True)
    return settings.values


def _schedule(text: str, files: Files) -> Mapping[str, Any]:
    if text.endswith(".gin"):
        from statekit.converters.formats.hparams import read_gin_schedule

        return vars(read_gin_schedule(Path(text), files))
    from statekit.state.schedules.call_text import parse_call

    return parse_call(text)


def read_config(arguments: tuple[str, ...], name: str | None, files: Files) -> dict[str, Any]:
    """Returns what `--config` says of a model, by the names of the map; later ones win.

    Raises:
        UsageError: It isn't of that map's model, or can't be read; lists every fault.
    """
    from statekit.converters.formats.hparams import read_gin, read_hparams, read_text
    from statekit.maps.model_map import settings_in

    settings, faults = settings_in(name, files), Faults()
    values: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for argument in arguments:
        if not argument.endswith(".gin") or "=" in argument:
            values |= settings.translated(read_hparams([argument], files=files).values, faults)
            continue
        path = Path(argument)
        text = read_text(path, files)
        bound = {one: vars(read_gin(text, path, one, files.account)) for one in settings.gin}
        read, others = settings.of_gin(bound, faults)
        if not read and not others:
            faults.add(f"binds nothing of {' or '.join(settings.gin) or 'a model of the map'}", argument)
        values, unread = values | read, unread | others
    faults += [
        (f"is {one:.80}, which is no plain value", key) for key, one in unread.items() if key not in values
    ]
    remedy = "say it: --config KEY=VALUE"
    faults.check(UsageError, "The configuration can't be taken", place="--config", remedy=remedy)
    return values


def place_of(what: str, is_one: Callable[[Path], bool]) -> Callable[..., Path | None]:
    """Returns a callback for click that refuses, before any work, a path at which a file can't be written.

    Args:
        what: What the file is called: `report`.
        is_one: Whether a file is such a one, which a new one may replace.
    """

    def check(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
        if value is None:
            return None
        if not value.parent.is_dir():
            raise NotFoundError(
                f"The {what}'s folder isn't there.", place=value.parent, remedy=f"mkdir -p {value.parent}"
            )
        if os.path.lexists(value) and (value.is_symlink() or not value.is_file() or not is_one(value)):
            raise TargetExistsError(
                f"There is something else in the {what}'s place.",
                place=value,
                expected=f"nothing, or a {what}",
                remedy="choose another name",
            )
        places: dict[Path, str] = ctx.meta.setdefault(_PLACES, {})
        if (other := places.setdefault(value.resolve(), what)) != what:
            raise UsageError(f"The {other} and the {what} are to be one file.", place=value)
        return value

    return check


_PLACES = "statekit.places"
"""Key of what one call writes beside its target: path -> what it is called."""


def _is_certificate(path: Path) -> bool:
    from statekit.verify.certificate import is_certificate

    return is_certificate(path)


certificate_place = place_of("certificate", _is_certificate)


def local_file(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Turns an argument into a path of this machine; a callback for click.

    Raises:
        UsageError: It is an address such as gs://bucket/run; says what to do instead.
    """
    if value is None:
        return None
    from statekit.converters.formats.zarr.stores import local_path

    return local_path(value)
