"""The table of all conversions as text: a table for each optimizer, variants down, layouts across."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from statekit.cli import output
from statekit.cli.output import Table
from statekit.conversion.contracts import Exactness
from statekit.conversion.matrix import Cell, cells

MARKS = {
    Exactness.BITWISE: "=",
    Exactness.ROUNDING: "~",
    Exactness.STATISTICS: "s",
    Exactness.ESTIMATE: "e",
}
LEGEND = (
    "= the same rule   ~ equal in real arithmetic   s other updates of the same slots   e slots too evolve otherwise",
    "`statekit convert` refuses s and e unless --require statistics or estimate allows them; --json tells why.",
)


def show_matrix(as_json: bool) -> None:
    """Prints the table of all conversions."""
    matrix = list(cells())
    if as_json:
        output.print_json("formats.matrix", {"conversions": [cell.to_json() for cell in matrix]})
        return
    stdout = output.screen()
    for schema, some in groupby(matrix, key=lambda cell: cell.schema):
        stdout.show(_table(schema, list(some)))
        stdout.say()
    for line in LEGEND:
        stdout.say(line)


def rows(some: list[Cell]) -> Iterator[tuple[str, ...]]:
    """Yields the lines of one optimizer's table: a variant, and a mark for each layout."""
    for variant, line in groupby(some, key=lambda cell: cell.variant):
        yield variant, *(MARKS[cell.exactness] for cell in line)


def layouts(some: list[Cell]) -> list[str]:
    """Returns the layouts of one optimizer's table, in the order of its columns."""
    return list(dict.fromkeys(cell.layout for cell in some))


def _table(schema: str, some: list[Cell]) -> Table:
    table = Table((schema, *layouts(some)))
    for row in rows(some):
        table.add_row(*row)
    return table
