"""`statekit doctor`: silent faults that a checkpoint's files show by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from statekit.attestation.doctor import Examination, doctor
from statekit.attestation.faults import FILE_FAULTS
from statekit.cli import output
from statekit.cli.arguments import (
    OF_FILES,
    OUTPUT,
    Page,
    about_checkpoint,
    completing,
    ref_options,
    report_option,
    source_places,
    with_more,
    write_report,
)
from statekit.cli.main import DONE, WANTING
from statekit.cli.output import Screen, Table, shown_path
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.errors import plural, some
from statekit.files.tree import Place

_WHAT = "What CHECKPOINT is"
_EVERYDAY = {
    _WHAT: ("container", "step", "hparams", "param_names"),
    "What counts": ("ignore",),
    OUTPUT: ("as_json", "report", "help", "help_all"),
}


@click.command(
    "doctor",
    cls=Page,
    everyday=_EVERYDAY,
    more=with_more(_EVERYDAY, about_checkpoint(_WHAT)),
    examples=(
        "statekit doctor t5x-ckpt",
        "statekit doctor trainer-run",
        "statekit doctor trainer-run --step 8 --json",
    ),
)
@click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True, callback=source_places)
@click.option(
    "--ignore",
    multiple=True,
    metavar="FINDING",
    shell_complete=completing(lambda: FILE_FAULTS),
    help="Accept a finding, by its name: doctor lists it and does not fail. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@ref_options(help={**OF_FILES, "step": "Examine one step of a run's folder. Default: all."})
@report_option
def command(
    checkpoints: tuple[Place, ...],
    ignore: tuple[str, ...],
    as_json: bool,
    ref: CheckpointRef,
    report: Path | None,
) -> int:
    """Finds faults that no loader notices.

    CHECKPOINT is of any system that `statekit formats` lists, or a run's folder. doctor examines each step of a run and
    compares the steps; it treats several checkpoints of one run in the same way. It finds moments that are zero, not
    finite, negative, stale, of few bits, or another parameter's; factored moments whose halves do not fit or are
    exchanged; scales, masters and powers that do not fit; parameters without a state; lost or rounded counts; files
    of several steps, damaged files, missing parts; groups with exchanged options; hyperparameters that changed. It
    reads every value once. The exit code is 1 if it finds a fault.
    """
    with output.reading() as tell:
        examinations = doctor(
            *(replace(ref, path=path) for path in checkpoints), ignore=ignore, on_tensor=tell
        )
    passed = all(examination.passed for examination in examinations)
    result = {
        "passed": passed,
        "checkpoints": [
            {"passed": examination.passed, **examination.to_json()} for examination in examinations
        ],
    }
    write_report(report, "doctor", result)
    if as_json:
        output.print_json("doctor", result)
        return DONE if passed else WANTING
    _show(output.screen(), examinations)
    return DONE if passed else WANTING


def _show(screen: Screen, examinations: Sequence[Examination]) -> None:
    for examination in examinations:
        count = plural(len(examination.findings), "finding") if examination.findings else "nothing found"
        done = "" if examination.updates is None else f", {examination.updates} updates done"
        screen.title(f"{shown_path(examination.path)}{done}: {count}")
        for finding in examination.findings:
            table = Table((finding.name, finding.subject))
            rows = {
                "at": some(finding.where),
                "expected": finding.expected,
                "found": finding.found,
                "why it matters": finding.why,
                "what to do": finding.remedy,
            }
            for name, text in rows.items():
                table.add_row(name, text)
            screen.show(table)
        screen.show_list("Odd, and may be right:", examination.notes)
