"""`statekit check`: whether checkpoints are what was written."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from statekit.cli import output
from statekit.cli.arguments import checkpoints_options
from statekit.cli.main import DONE, WANTING
from statekit.cli.output import Screen, Table, from_here, shown_path
from statekit.conversion.check import MANIFEST, CheckedCheckpoint, check
from statekit.errors import plural, size
from statekit.files.stage import Progress
from statekit.files.tree import Place

MAX_LISTED = 20


@click.command("check")
@checkpoints_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    checkpoints: tuple[Place, ...], container: str | None, step: int | None, as_json: bool, **reading: Any
) -> int:
    """Proves every byte that a manifest or a checksum covers.

    CHECKPOINT is a file or folder of any system that `statekit formats` lists, a folder of files, or a run's folder, of
    which check reads every step. `convert` and `seal` write a manifest with a digest of every byte. Without a manifest,
    check compares the checksums of the format and lists the files that have none. The exit code is 1 if a byte is not
    what was written.
    """
    with output.progress() as bar:
        task = bar.add_task("reading", total=None)

        def tell(progress: Progress) -> None:
            bar.update(task, description=progress.name, completed=progress.done, total=progress.total)

        reports = [
            check(path, container=container, step=step, **reading, on_progress=tell) for path in checkpoints
        ]
    passed = all(report.passed for report in reports)
    if as_json:
        output.print_json("check", {"passed": passed, "checks": [report.to_json() for report in reports]})
        return DONE if passed else WANTING
    stdout = output.screen()
    for report in reports:
        for checkpoint in report.checkpoints:
            _show(stdout, checkpoint)
    faults = sum(len(checkpoint.faults) for report in reports for checkpoint in report.checkpoints)
    stdout.say()
    stdout.say(
        "Nothing contradicts what was written." if passed else f"{plural(faults, 'fault')}.", bold=True
    )
    return DONE if passed else WANTING


def _show(stdout: Screen, checked: CheckedCheckpoint) -> None:
    step = "" if checked.step is None else f", step {checked.step}"
    stdout.title(f"{shown_path(checked.path)} ({checked.container}{step})")
    table = Table(("what", "proven by", "bytes"), right=("bytes",))
    sizes: Counter[tuple[str, str]] = Counter()
    counts = Counter((item.kind, item.by) for item in checked.items)
    for item in checked.items:
        sizes[item.kind, item.by] += item.nbytes
    for (kind, by), count in counts.items():
        table.add_row(plural(count, kind), _means(checked, by), size(sizes[kind, by]))
    stdout.show(table)
    bare = [item.name for item in checked.items if not item.by]
    stdout.show_list("No checksum; `statekit seal` adds a manifest:", _some(bare))
    stdout.show_list(
        "Not what was written:", _some([f"{fault} @ {place}" for fault, place in checked.faults])
    )
    stdout.show_list("Odd:", _some([f"{fault} @ {place}" for fault, place in checked.notes]))


def _means(checked: CheckedCheckpoint, by: str) -> str:
    if by != MANIFEST:
        return f"the format's {by}" if by else "nothing"
    return f"the manifest {from_here(f'{checked.manifest}')}" + (" (sealed)" if checked.is_sealed else "")


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - MAX_LISTED
    return [*lines[:MAX_LISTED], *([f"and {more} more; --json lists them"] if more > 0 else [])]
