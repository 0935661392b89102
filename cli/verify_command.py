"""`statekit verify`: whether a checkpoint goes on with the run of the one that it was made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from statekit.arrays.backend import BACKEND_NAMES
from statekit.cli import output
from statekit.cli.arguments import (
    OUTPUT,
    Page,
    about_checkpoint,
    certificate_place,
    complete_maps,
    read_config,
    read_step,
    ref_options,
    report_option,
    source_place,
    with_more,
    write_report,
)
from statekit.cli.main import DONE, WANTING
from statekit.cli.output import Screen, Table
from statekit.conversion.checkpoint_ref import OPTIONS, CheckpointRef
from statekit.conversion.contracts import Exactness
from statekit.errors import UsageError, plural, size, some
from statekit.files.tree import Place
from statekit.pages.verdicts import BITS_KEPT, meaning
from statekit.state.train_state import StepOffset
from statekit.verify.certificate import Certificate
from statekit.verify.verification import STEPS, verify

MAX_ROWS = 40


_SOURCE, _DST = "What SRC is", "How DST was made, where it doesn't say it"
_EVERYDAY = {
    _SOURCE: ("container", "step", "hparams", "param_names"),
    _DST: ("map_name", "config", "step_offset"),
    "How much is proven": ("steps", "everything", "require"),
    OUTPUT: ("to", "repeat", "as_json", "report", "help", "help_all"),
}


@click.command(
    "verify",
    cls=Page,
    everyday=_EVERYDAY,
    more=with_more(
        _EVERYDAY, about_checkpoint(_SOURCE), {"How much is proven": ("gradients", "backend", "seed")}
    ),
    examples=(
        "statekit verify t5x-ckpt torch-ckpt",
        "statekit verify t5x-ckpt torch-ckpt --certificate proof.json",
        "statekit verify --repeat proof.json",
    ),
)
@click.argument("source", metavar="[SRC", required=False, type=click.Path(), callback=source_place)
@click.argument("target", metavar="DST]", required=False, type=click.Path(), callback=source_place)
@click.option(
    "--repeat",
    metavar="CERT",
    type=click.Path(path_type=Path),
    help="Repeat the proof of a certificate and compare the results.",
)
@click.option(
    "--steps",
    metavar="K",
    type=click.IntRange(0),
    default=STEPS,
    show_default=True,
    help="The number of updates of each run. 0: none.",
)
@click.option(
    "--gradients",
    metavar="all|random|adversarial|FILE",
    default="all",
    show_default=True,
    help="The gradients of both runs. FILE: safetensors or torch.save's, with keys <update>/<parameter>, "
    "or <parameter> for one set that every update takes, by the target's names.",
)
@click.option(
    "--backend",
    type=click.Choice(BACKEND_NAMES),
    default="numpy",
    show_default=True,
    help="The backend of statekit's steps.",
)
@click.option(
    "--all", "everything", is_flag=True, help="Step every element of every parameter instead of a sample."
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="The seed of the sample and of the gradients.",
)
@click.option(
    "--require",
    type=click.Choice([e.name.lower() for e in Exactness if e < Exactness.REFUSED]),
    default=Exactness.ROUNDING.name.lower(),
    show_default=True,
    help="The lowest exactness that passes.",
)
@click.option(
    "--map",
    "map_name",
    metavar="SOURCE:TARGET|FILE",
    shell_complete=complete_maps,
    help="The map that made DST, where DST does not name it.",
)
@click.option("--config", multiple=True, metavar="FILE|KEY=VALUE", help="The model's sizes that the map got.")
@click.option(
    "--step-offset",
    metavar="keep|reset|N",
    callback=read_step,
    default="keep",
    help="As in convert, where DST does not store it.",
)
@click.option(
    "--certificate",
    "to",
    metavar="FILE.json",
    type=click.Path(path_type=Path),
    callback=certificate_place,
    help="Write the certificate into this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@ref_options("source")
@report_option
def command(
    ref: CheckpointRef,
    target: Path | None,
    repeat: Path | None,
    steps: int,
    gradients: str,
    backend: str,
    everything: bool,
    seed: int,
    require: str,
    map_name: str | None,
    config: tuple[str, ...],
    step_offset: StepOffset,
    to: Path | None,
    as_json: bool,
    report: Path | None,
) -> int:
    """Proves that DST continues the run of SRC.

    SRC and DST may be of any two systems. verify reads every tensor of both and compares each with the tensor that SRC
    becomes there. It compares the rules of the two implementations field by field. It steps both sides on the same
    gradients, by the class of torch.optim, Transformers, Optax or Keras where that is installed, and compares every
    element with the bound of the arithmetic (docs/bounds.md). It puts faults into this very state and must find them.
    The exit code is 1 if DST is refuted, or less exact than --require.
    """
    source = None if ref.path is None else ref.place
    if (repeat is None) == (source is None or target is None) or (
        repeat is not None and source is not None and target is None
    ):
        raise UsageError(
            "Two checkpoints or a certificate are needed.", expected="SRC DST, or --repeat CERT [SRC DST]"
        )
    if repeat is not None:
        _refuse_said_again()
        return _repeat(repeat, source, target, ref, as_json, report)
    assert source is not None and target is not None  # said above
    certificate = verified(
        ref,
        target,
        config,
        steps=steps,
        gradients=gradients,
        backend=backend,
        everything=everything,
        seed=seed,
        require=Exactness[require.upper()],
        map=map_name,
        step_offset=step_offset,
    )
    if to is not None:
        certificate.save(to)
    write_report(report, "verify", certificate.to_json())
    show(certificate, to, as_json)
    return DONE if certificate.passed else WANTING


def verified(source: CheckpointRef, target: Place, config: tuple[str, ...], **asked: Any) -> Certificate:
    """Verifies two checkpoints while it is shown how far that is.

    Args:
        source: The source.
        target: What was made of it.
        config: What `--config` says.
        asked: What else `statekit.verify.verification.verify` takes.
    """
    from statekit.files.source import Files

    with Files(source.job_budget()) as files:
        settings = read_config(config, asked.get("map"), files) if config else None
    with output.reading() as tell:
        return verify(
            source,
            target,
            config=settings or None,
            on_progress=lambda phase, name, size: tell(f"{phase} {name}", size),
            **asked,
        )


def show(certificate: Certificate, to: Path | None = None, as_json: bool = False) -> None:
    """Prints a certificate: the verdict first."""
    if as_json:
        output.print_json("verify", certificate.to_json())
        return
    _show(output.screen(), certificate.data, certificate.counts())
    if to is not None:
        output.screen().say(f"The certificate is {to}, digest {certificate.digest}.")


_IN_CERTIFICATE = (
    "steps", "gradients", "backend", "everything", "seed", "require", "map_name", "config", "step_offset",
    "to", *(option.name for option in OPTIONS if option.use != "trust"),
)  # fmt: skip
"""What a certificate says itself, and nobody may say otherwise where it is repeated; and where it would be written."""


def _refuse_said_again() -> None:
    """Refuses what was said beside --repeat and is said by the certificate."""
    context = click.get_current_context()
    options = [
        param.opts[0]
        for param in context.command.params
        if param.name in _IN_CERTIFICATE
        and context.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
    ]
    if options:
        raise UsageError(
            "A certificate is repeated as it was asked for.",
            place="--repeat",
            found=f"{', '.join(options)} too",
            remedy="leave it out, or verify SRC and DST anew",
        )


def _repeat(
    path: Path,
    source: Place | None,
    target: Place | None,
    hints: CheckpointRef,
    as_json: bool,
    report: Path | None,
) -> int:
    from statekit.verify.repetition import repeated

    with output.reading() as tell:
        done = repeated(path, source, target, lambda phase, name, size: tell(f"{phase} {name}", size), hints)
    result = {"repeats": done.same, "differs": list(done.differs), **done.again.to_json()}
    write_report(report, "verify", result)
    if as_json:
        output.print_json("verify", result)
    else:
        screen = output.screen()
        screen.say(
            f"{path}: {'it comes out the same' if done.same else 'it comes out otherwise'}.", bold=True
        )
        asked, replay = done.again.data["asked"], done.again.data["replay"]
        steps = plural(replay["updates"], "update") if replay["stepped"] else "no update"
        screen.say(
            f"{asked['source']} to {asked['target']}: {done.again.data['verdict']['headline']}; {steps}."
        )
        screen.show_list("Other than in the certificate:", done.differs)
        screen.show_list("Other, as another machine or other versions may have it:", done.notes)
    return DONE if done.same and done.passed else WANTING


def _show(screen: Screen, data: Mapping[str, Any], counts: Mapping[str, int]) -> None:
    verdict, replay = data["verdict"], data["replay"]
    screen.say(f"{verdict['headline']}. {meaning(verdict)}", bold=True)
    if verdict["nobody_gave"]:
        screen.say(f"The target holds facts that are not given: {some(verdict['nobody_gave'])}.", bold=True)
        screen.say("Say it (--hparams NAME=VALUE), or accept documented defaults (--assume-defaults).")
    screen.say()
    for name, side in (("from", "source"), ("to", "target")):
        side_data = data["identity"][side]
        at = "" if side_data["step"] is None else f", step {side_data['step']}"
        screen.say(f"{name:<6}{data['asked'][side]}")
        amount = f"{plural(len(side_data['tensors']), 'tensor')}, {size(side_data['bytes'])}"
        screen.say(f"{side_data['container']}, {side_data['layout']}{at}; {amount}", indent=6)
    screen.show_list("Against it:", verdict["because"][:MAX_ROWS])
    if len(verdict["because"]) > MAX_ROWS:
        screen.say(f"and {len(verdict['because']) - MAX_ROWS} more; --json lists them", indent=2)
    screen.title("State")
    kept = "every stored bit is kept; with the updates " * (meaning(verdict) == BITS_KEPT)
    screen.say(f"{kept}{', '.join(f'{count} {degree}' for degree, count in counts.items())}", indent=2)
    pairs, back = data["map"]["bijection"], data["map"]["round_trip"]
    whole = "each once" if not pairs["faults"] else "NOT each once"
    screen.say(f"{pairs['elements']} elements of parameters and slots, {whole}", indent=2)
    if back["done"]:
        ends = "to the same bits" if not back["differ"] else f"to others: {some(back['differ'])}"
        screen.say(f"back in the source's form {plural(back['tensors'], 'tensor')} come {ends}", indent=2)
    else:
        screen.say(f"not taken back: {back['because']}", indent=2)
    _show_rule(screen, data["rule"])
    if replay["stepped"]:
        _show_replay(screen, replay)
        _show_controls(screen, data["controls"])
    else:
        screen.title("Updates")
        screen.say(f"none: {replay['because']}", indent=2)
    screen.show_list("Not compared:", data["not_compared"])
    screen.show_list("Assumed:", data["assumptions"])
    screen.say()


def _show_rule(screen: Screen, rule: Mapping[str, Any]) -> None:
    screen.title("Rule")
    if rule["from"] == rule["to"]:
        screen.say(f"{rule['from']} on both sides", indent=2)
    else:
        screen.say(
            f"{rule['from']} to {rule['to']}: {rule['exactness']}; {rule['equal']} fields are equal", indent=2
        )
    active = [field for field in rule["fields"] if field["fate"] != "idle"]
    if active:
        table = Table(("field", "source", "target", "", "why"), drop=("why",))
        for difference in sorted(active, key=lambda difference: difference["fate"] != "semantic"):
            table.add_row(
                difference["what"],
                _value(difference["source"]),
                _value(difference["target"]),
                difference["fate"],
                difference["why"],
            )
        screen.show(table)
    idle = [field["what"] for field in rule["fields"] if field["fate"] == "idle"]
    if idle:
        screen.say(f"other, without an effect here: {some(idle)}", indent=2)


def _show_replay(screen: Screen, replay: Mapping[str, Any]) -> None:
    screen.title("Updates")
    sample = replay["sample"]
    screen.say(f"source  {replay['source']}", indent=2)
    screen.say(f"target  {replay['target']}", indent=2)
    if (given := replay.get("gradients_file")) is not None:
        screen.say(f"on the gradients of {replay['gradients']}: {_sets(given, replay['updates'])}", indent=2)
    parts = [f"{plural(len(sample['stepped']), 'parameter')}, {replay['updates']} updates each"]
    if sample["stands_for"]:
        parts.append(f"standing for {len(sample['stands_for'])} more of their kind")
    if sample["windows"]:
        parts.append(f"of {len(sample['windows'])} a window")
    if sample["stands_for"] or sample["windows"]:
        parts.append(f"drawn with seed {sample['seed']}; --all takes all")
    screen.say("; ".join(parts), indent=2)
    table = Table(
        ("gradients", "outside", "ULP", "/update", "/bound", "equal bits"),
        right=("outside", "ULP", "/update", "/bound", "equal bits"),
    )
    for row in replay["probes"]:
        total = sum(row["histogram"])
        outside = row["outside"]["target"] + row["outside"]["source"]
        equal = f"{100 * row['histogram'][0] / total:.0f}%" if total else "-"
        table.add_row(
            row["name"],
            str(outside),
            *(f"{float(row[name]):.2g}" for name in ("ulps", "relative", "ratio")),
            equal,
        )
    screen.show(table)
    for note in replay["notes"]:
        screen.say(note, indent=2)


def _sets(given: Mapping[str, Any], updates: int) -> str:
    """Says which of a file's gradients were taken, and what the file is."""
    sets = given["sets"]
    which = "one set, for each update" if sets == 1 < updates else f"{updates} of {plural(sets, 'update')}"
    return f"{which}; digest {given['digest']}"


def _show_controls(screen: Screen, controls: Sequence[Mapping[str, Any]]) -> None:
    screen.title("Faults put into this state")
    screen.say(
        f"seen in the updates: {', '.join(control['name'] for control in controls if control['detected']) or 'none'}",
        indent=2,
    )
    unseen = [control for control in controls if not control["detected"]]
    for missed in unseen:
        screen.say(f"this proves nothing about: {missed['name']}; {missed['because']}", indent=2)


def _value(value: Any) -> str:
    text = str(value)
    return text if len(text) < 28 else f"{text[:25]}..."
