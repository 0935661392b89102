"""`statekit formats`: what statekit reads and writes."""

from __future__ import annotations

from typing import Any

import click

from statekit.cli import output
from statekit.cli.matrix_view import show_matrix
from statekit.cli.output import Table
from statekit.conversion import registry
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
