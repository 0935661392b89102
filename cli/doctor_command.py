"""`statekit doctor`: silent faults that a checkpoint's files show by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from statekit.attestation.doctor import Examination, doctor
from statekit.cli import output
from statekit.cli.arguments import checkpoints_options
from statekit.cli.main import DONE, WANTING
from statekit.cli.output import Screen
from statekit.conversion.contracts import Hints
from statekit.errors import some


@click.command("doctor")
@checkpoints_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    checkpoints: tuple[Path, ...], container: str | None, step: int | None, as_json: bool, **reading: Any
) -> int:
    """Finds silent faults of checkpoints: they load, and go on wrong.

    CHECKPOINT is of any system that `statekit formats` lists, or a run's folder, whose steps are looked at one by one
    and held against each other. Found are moments that are zero, not finite, negative, another parameter's, or those of
    an earlier step; slots in fewer bits than their parameters; masters that don't fit; files of several steps; a
    step_offset after the step; hyperparameters that changed. The exit code is 1 if anything was found.
    """
    hints = Hints.given(**reading)
    each = [one for path in checkpoints for one in doctor(path, container=container, step=step, hints=hints)]
    passed = all(one.passed for one in each)
    if as_json:
        output.print_json("doctor", {"passed": passed, "checkpoints": [one.to_json() for one in each]})
        return DONE if passed else WANTING
    screen = output.screen()
    for one in each:
        _show(screen, one)
    return DONE if passed else WANTING


def _show(screen: Screen, one: Examination) -> None:
    count = output.plural(len(one.findings), "finding") if one.findings else "nothing found"
    screen.title(f"{one.path}, {one.updates} updates done: {count}")
    for finding in one.findings:
        screen.say(f"{finding.name}: {finding.subject}", indent=2)
        rows = {"at": some(finding.where), "expected": finding.expected, "found": finding.found}
        for name, text in {**rows, "do": finding.remedy}.items():
            screen.say(f"{name}: {text}", indent=4)
    screen.show_list("Odd, and may be right:", one.notes)
