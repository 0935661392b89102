"""`statekit cold-start`: how far the first updates of a new optimizer are from those of the run that goes on."""

from __future__ import annotations

import click

from statekit.cli import output
from statekit.cli.arguments import checkpoint_options
from statekit.cli.output import Screen, Table
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.errors import plural
from statekit.verify.cold_start import ALIKE, UPDATES, ColdStart, cold_start

MAX_ROWS = 40


@click.command("cold-start")
@click.option(
    "--updates", type=int, metavar="K", default=UPDATES, show_default=True, help="The number of updates."
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="The seed of the sample and of the gradients.",
)
@click.option(
    "--all", "everything", is_flag=True, help="Step every element of every parameter instead of a sample."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@checkpoint_options
def command(ref: CheckpointRef, updates: int, seed: int, everything: bool, as_json: bool) -> None:
    """Compares a new optimizer's first updates with the run's.

    A cold start has the checkpoint's weights and a new optimizer. Both sides get the same learning rate and the same
    random gradients, which are as large as the gradients that made the second moment. The table has a row for each
    layer.
    """
    with output.progress("updates") as bar:
        task = bar.add_task("stepping", total=2 * updates)
        result = cold_start(
            ref, updates=updates, seed=seed, everything=everything, on_update=lambda update: bar.advance(task)
        )
    if as_json:
        output.print_json("cold-start", result.to_json())
        return
    _show(output.screen(), result, updates)


def _show(screen: Screen, result: ColdStart, updates: int) -> None:
    first, last = result.median(0), result.median(updates - 1)
    screen.say(
        f"Without its optimizer's state the run's first update is off by {first:.0%} of its size, update {updates} by "
        f"{last:.0%} (median of the layers).",
        bold=True,
    )
    screen.say(f"{result.path}, {plural(result.updates, 'update')} done")
    screen.say()
    table = Table(
        (
            "layer",
            "first: off by",
            "cosine",
            "size",
            f"update {updates}: off by",
            f"alike ({ALIKE:.0%}) from",
        ),
        right=("first: off by", "cosine", "size", f"update {updates}: off by", f"alike ({ALIKE:.0%}) from"),
        drop=("size", "cosine"),
    )
    for layer in result.layers[:MAX_ROWS]:
        name = layer.path if not layer.stands_for else f"{layer.path} (and {layer.stands_for} of its kind)"
        alike = "later" if layer.alike_from is None else f"update {layer.alike_from}"
        numbers = (
            f"{layer.apart[0]:.1%}",
            f"{layer.cosine[0]:.3f}",
            f"{layer.size[0]:.2f}x",
            f"{layer.apart[-1]:.1%}",
        )
        table.add_row(name, *numbers, alike)
    screen.show(table)
    if len(result.layers) > MAX_ROWS:
        screen.say(f"and {len(result.layers) - MAX_ROWS} more; --json lists them")
    screen.show_list("Said beside:", result.notes)
