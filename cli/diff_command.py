"""`statekit diff`: in what two checkpoints differ, whatever systems they are of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from statekit.cli import output
from statekit.cli.arguments import complete_maps, report_option, sides_options, source_place, write_report
from statekit.cli.main import DONE, WANTING
from statekit.cli.output import Screen, Table, shown_path
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.diff import Diff, diff
from statekit.errors import plural, size, some
from statekit.state.comparison import Difference

MAX_ROWS = 60
_TENSORS = ("missing", "extra", "shape", "dtype", "values")


@click.command("diff")
@click.argument("left", metavar="A", callback=source_place)
@click.argument("right", metavar="B", callback=source_place)
@click.option(
    "--map",
    "map_name",
    metavar="NAME|FILE",
    shell_complete=complete_maps,
    help="The map from A's model to the model of B's codebase; `statekit maps` lists all maps.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@sides_options
@report_option
def command(
    left: CheckpointRef, right: CheckpointRef, map_name: str | None, as_json: bool, report: Path | None
) -> int:
    """Shows how two checkpoints differ, or where two runs part.

    A and B are of any systems that `statekit formats` lists. diff brings both to canonical form. It compares names,
    shapes, dtypes and bits of every tensor, then updates done, groups, hyperparameters by parameter, and the schedule.
    For two runs' folders it compares the steps that both have, up to the first difference. Options about the files
    apply to both sides; --left and --right options apply to one. The exit code is 1 if anything differs.
    """
    with output.reading() as tell:
        result = diff(left, right, map=map_name, on_tensor=tell)
    write_report(report, "diff", result.to_json())
    if as_json:
        output.print_json("diff", result.to_json())
    else:
        _show(output.screen(), result)
    return DONE if result.equal else WANTING


def _show(screen: Screen, result: Diff) -> None:
    at = "" if result.step is None else f", step {result.step}"
    screen.say(f"A: {shown_path(result.left)}{at}")
    screen.say(f"B: {shown_path(result.right)}{at}")
    if result.compared:
        screen.say(f"Equal at {plural(len(result.compared), 'step')}: {some([*map(str, result.compared)])}.")
    tensors = [difference for difference in result.differences if difference.what in _TENSORS]
    if tensors:
        screen.title(f"The first that differs: {tensors[0].place}")
        screen.show(_tree(tensors))
        if len(tensors) > MAX_ROWS:
            screen.say(f"and {len(tensors) - MAX_ROWS} more; --json lists them")
    others = [difference for difference in result.differences if difference.what not in _TENSORS]
    screen.show_list("Beside tensors:", _gathered(others))
    screen.show_list("Written otherwise, and the same:", result.normalised)
    screen.show_list("Not compared:", result.unsaid)
    screen.say()
    count = plural(result.tensors, "tensor")
    if result.equal:
        screen.say(f"Equal: {count}, {size(result.bytes_read)} of each.", bold=True)
    else:
        screen.say(
            f"{plural(len(result.differences), 'difference')} in {count} and what stands beside them.",
            bold=True,
        )


def _tree(tensors: Sequence[Difference]) -> Table:
    """Returns the differing tensors as a tree, slots below their parameters."""
    table = Table(
        ("tensor", "differs in", "elements", "ULP", "relative"), right=("elements", "ULP", "relative")
    )
    above: list[str] = []
    for tensor in tensors[:MAX_ROWS]:
        parts = tensor.place.split("/")
        shared = next(
            (i for i, pair in enumerate(zip(above, parts, strict=False)) if pair[0] != pair[1]), len(above)
        )
        shared = min(shared, len(parts) - 1)
        for i in range(shared, len(parts) - 1):
            table.add_row(f"{'  ' * i}{parts[i]}/")
        apart, name = tensor.distance, f"{'  ' * (len(parts) - 1)}{parts[-1]}"
        sentence = (
            tensor.what
            if tensor.what == "values"
            else f"{tensor.what}: {_shown(tensor.expected)} -> {_shown(tensor.actual)}"
        )
        numbers = (
            (f"{apart.unequal} of {apart.size}", f"{apart.ulps:.3g}", f"{apart.relative:.3g}")
            if apart
            else ()
        )
        table.add_row(name, sentence, *numbers)
        above = parts
    return table


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)


def _gathered(differences: Sequence[Difference]) -> Iterator[str]:
    """Yields what differs beside tensors, many parameters with the same in one line."""
    places: dict[tuple[str, str, str], list[Difference]] = {}
    for difference in differences:
        name = {"updates": "updates done", "moved": "is trained"}.get(
            difference.what, difference.item or difference.what
        )
        places.setdefault((name, _shown(difference.expected), _shown(difference.actual)), []).append(
            difference
        )
    for (name, left, right), alike in places.items():
        yield f"{name}: {left} -> {right} @ {some([difference.path or difference.place for difference in alike])}"
