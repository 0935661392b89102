"""`statekit formats`: what statekit reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import click

from statekit.cli import output
from statekit.cli.output import Table
from statekit.conversion import registry
from statekit.conversion.contracts import Exactness
from statekit.conversion.matrix import Cell, cells
from statekit.conversion.registry import ContainerCard, LayoutCard
from statekit.state.schema import is_native


@click.command("formats")
@click.option(
    "--matrix", is_flag=True, help="Show how exactly a run of each variant continues in each layout."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(matrix: bool, as_json: bool) -> None:
    """Lists the containers and layouts that statekit knows.

    A container is the form of the files; `--from` and `--to` name one. A layout is the meaning of the names for one
    optimizer; `--layout` names one.
    """
    if matrix:
        show_matrix(as_json)
        return
    containers = [_container(registry.container_card(name)) for name in registry.container_names()]
    layouts = [_layout(registry.layout_card(name)) for name in registry.layout_names()]
    if as_json:
        output.print_json("formats", {"containers": containers, "layouts": layouts})
        return
    stdout = output.screen()
    files = Table(("container", "reads", "writes", "suffixes", "what"), drop=("reads", "suffixes"))
    for row in containers:
        writes = f"a {row['writes']}" if row["writes"] else "no"
        files.add_row(row["name"], "yes", writes, " ".join(row["suffixes"]), row["title"])
    names = Table(("layout", "optimizers", "containers", "what"), drop=("containers",))
    for row in layouts:
        optimizers = (
            " ".join(name for name in row["optimizers"] if not is_native(name)) + ", several" * row["several"]
        )
        names.add_row(row["name"], optimizers, " ".join(row["containers"]), row["title"])
    stdout.show(files)
    stdout.say()
    stdout.show(names)


def _container(container: ContainerCard) -> dict[str, Any]:
    return {
        "name": container.name,
        "title": container.title,
        "reads": True,
        "writes": container.target_kind,
        "suffixes": list(container.suffixes),
    }


def _layout(layout: LayoutCard) -> dict[str, Any]:
    return {
        "name": layout.name,
        "title": layout.title,
        "optimizers": list(layout.variants),
        "several": bool(layout.holds_several),
        "containers": list(layout.containers),
    }


MARKS = {Exactness.BITWISE: "=", Exactness.ROUNDING: "~", Exactness.STATISTICS: "s", Exactness.ESTIMATE: "e"}
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
