"""`statekit seal`: a manifest beside a checkpoint as it is."""

from __future__ import annotations

from typing import Any

import click

from statekit.cli import output
from statekit.cli.arguments import checkpoints_options
from statekit.cli.output import Table, shown_path
from statekit.conversion.seal import seal
from statekit.files.stage import Progress
from statekit.files.tree import Place

_DONE = {"sealed": "sealed", "renewed": "sealed anew", "proven": "has a manifest that fits"}


@click.command("seal")
@checkpoints_options
@click.option(
    "--renew",
    multiple=True,
    metavar="FILE",
    help="Seal a file as it is, although an earlier manifest contradicts it. The file may be damaged. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    checkpoints: tuple[Place, ...],
    container: str | None,
    step: int | None,
    renew: tuple[str, ...],
    as_json: bool,
    **reading: Any,
) -> None:
    """Writes a manifest beside a checkpoint as it is.

    CHECKPOINT is a file or folder of any system that `statekit formats` lists, a folder of files, or a run's folder, of
    which seal seals every step. seal does not touch the checkpoint's own files: it writes `statekit.json` into a
    folder, and `statekit.<name>.json` beside a file. From then on `check` and every other verb notice a change. A new
    seal takes files that were rewritten since the last one, and refuses other files that contradict the manifest.
    """
    with output.progress() as bar:
        task = bar.add_task("reading", total=None)

        def tell(progress: Progress) -> None:
            bar.update(task, description=progress.name, completed=progress.done, total=progress.total)

        reports = [
            seal(path, container=container, step=step, renew=renew, **reading, on_progress=tell)
            for path in checkpoints
        ]
    if as_json:
        output.print_json("seal", {"seals": [report.to_json() for report in reports]})
        return
    stdout = output.screen()
    table = Table(("checkpoint", "", "manifest", "files", "tensors"), right=("files", "tensors"))
    for result in (checkpoint for report in reports for checkpoint in report.checkpoints):
        table.add_row(
            shown_path(result.path),
            _DONE[result.done],
            shown_path(result.manifest),
            str(result.files),
            str(result.tensors),
        )
    stdout.show(table)
    for result in (checkpoint for report in reports for checkpoint in report.checkpoints):
        stdout.show_list(f"Changed since, and taken as it is, in {shown_path(result.path)}:", result.changed)
