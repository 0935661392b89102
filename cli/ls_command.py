"""`statekit ls`: the runs below a folder, and from which of their steps one can go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from statekit.cli import output
from statekit.cli.arguments import local_file
from statekit.cli.output import Screen, Styled, Table
from statekit.errors import UsageError, plural, size
from statekit.files.source import not_there
from statekit.service.runs import RunAt, runs_below


@click.command("ls")
@click.argument("folder", metavar="DIR", default=".", callback=local_file)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every step of each run.")
def command(folder: Path, as_json: bool) -> None:
    """Lists the runs below a folder, and whether each can be resumed.

    DIR is a folder with checkpoints of any systems, however deep; the working directory if none is named. Checkpoints
    of one folder with the same parameters and optimizer are steps of one run. A step is resumable if it can be read and
    holds parameters and an optimizer's state. Only headers are read, and links are passed over.
    """
    if not folder.exists():
        raise not_there(folder)
    if not folder.is_dir():
        raise UsageError("ls lists folders.", place=folder, remedy=f"statekit inspect {folder}")
    with output.progress("checkpoints") as bar:
        task = bar.add_task("looking", total=None)

        def tell(path: str) -> None:
            bar.update(task, description=path)
            bar.advance(task)

        runs = runs_below(folder, tell)
    if as_json:
        total = sum(run.size for run in runs)
        output.print_json(
            "ls", {"folder": str(folder), "size": total, "runs": [run.to_json() for run in runs]}
        )
        return
    _show(output.screen(), folder, runs)


def _show(screen: Screen, folder: Path, runs: Sequence[RunAt]) -> None:
    if not runs:
        screen.say(f"No checkpoint lies below {folder}. `statekit formats` lists what statekit reads.")
        return
    table = Table(
        ("run", "steps", "newest", "optimizer", "resumable", "seal", "size", "why not"),
        right=("steps", "newest", "size"),
        drop=("seal", "steps", "optimizer"),
    )
    for run in runs:
        newest = run.newest
        step, optimizer = newest.columns["step"], newest.columns["optimizer"]
        table.add_row(
            run.path,
            str(len(run.steps)),
            "-" if step is None else str(step),
            optimizer or "-",
            Styled(_resumable(run), bold=newest.columns["resumable"]),
            str(newest.columns["seal"]),
            size(run.size),
            newest.why,
        )
    screen.show(table)
    checkpoints = sum(len(run.steps) for run in runs)
    screen.say()
    screen.say(f"{plural(checkpoints, 'checkpoint')}, {size(sum(run.size for run in runs))} in all.")
    screen.say("`statekit doctor` looks into their values; `statekit inspect DIR/RUN --step N` shows one.")


def _resumable(run: RunAt) -> str:
    """Says whether the newest step is resumable, and if not, which older one is."""
    older = run.newest_resumable
    if run.newest.columns["resumable"]:
        return "yes"
    return "no" if older is None else f"no; step {older.columns['step']} is"
