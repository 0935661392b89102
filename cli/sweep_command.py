"""`statekit sweep`: removes what killed conversions left."""

from __future__ import annotations

from pathlib import Path

import click

from statekit.cli import output
from statekit.cli.arguments import written_place
from statekit.cli.output import Table
from statekit.errors import plural
from statekit.files.durable import sweep
from statekit.files.sweeping import Left
from statekit.files.tree import Place, StoredPlace


@click.command("sweep")
@click.argument("folder", metavar="FOLDER", callback=written_place)
@click.option(
    "--idle-hours",
    type=click.FloatRange(min=0),
    help="Treat a writer on another machine as dead after so many hours without a write.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(folder: Place, idle_hours: float | None, as_json: bool) -> None:
    """Removes the remains of killed conversions.

    FOLDER is a target or a folder with targets, in a store or on this machine. sweep removes only what statekit put
    there, and only if its writer is proven dead: a process of this machine that has ended. In a store, `--idle-hours`
    decides when a writer of another machine counts as dead. sweep keeps a target that lacks only its last step. The
    store's own rule removes parts of unfinished uploads: docs/remote.md.
    """
    swept = _in_store(folder, idle_hours) if isinstance(folder, StoredPlace) else _here(Path(folder))
    if as_json:
        output.print_json("sweep", {"left": [vars(left) for left in swept]})
        return
    screen = output.screen()
    if not swept:
        screen.say(f"Nothing of a killed conversion lies in {folder}.")
        return
    table = Table(("target", "writer", "done", "objects", "why"), right=("objects",))
    for left in swept:
        table.add_row(left.target, left.writer, left.done, str(left.objects), left.why)
    screen.show(table)
    removed = sum(left.done == "removed" for left in swept)
    screen.say(f"{plural(removed, 'unfinished target')} removed.")


def _in_store(folder: StoredPlace, idle_hours: float | None) -> list[Left]:
    from statekit.files.store_home import bucket_of
    from statekit.files.sweeping import swept

    objects, name = bucket_of(folder)
    return swept(objects, name, idle_hours)


def _here(folder: Path) -> list[Left]:
    return [Left(f"{path}", "a process of this machine", "removed", "", 1) for path in sweep(folder)]
