"""Who imports whom: read from the text of every module, through the links by which top-level folders are statekit's.

    python tests/import_graph.py [CHECKOUT]

prints the rooms (the folders of statekit, and its modules outside of one), the floors they stand on, and the arrows
between them; of containers and layouts likewise.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

HOMES = {"statekit": "statekit", "converters": "statekit.converters", "cli": "statekit.cli"}
FLOORS = (
    ("statekit.errors",),
    ("statekit.budget", "statekit.pipeline"),
    ("statekit.tensors", "statekit.schemas"),
    ("statekit.state", "statekit.files", "statekit.arrays"),
    ("statekit.conversion.checkpoint_ref", "statekit.optim"),
    ("statekit.conversion.contracts",),
    ("statekit.converters.formats", "statekit.maps", "statekit.statistics"),
    ("statekit.lines",),
    ("statekit.converters.containers", "statekit.converters.layouts"),
    ("statekit.conversion",),
    ("statekit.dropin", "statekit.scale"),
    ("statekit.attestation", "statekit.pages", "statekit.engines"),
    ("statekit.torch", "statekit.jax", "statekit.tensorflow"),
    ("statekit.verify", "statekit.hf", "statekit.lightning", "statekit.accelerate"),
    ("statekit",),
    ("statekit.service",),
    ("statekit.cli", "statekit.client"),
    ("statekit.testing",),
    ("statekit.__main__",),
)
"""Rooms from the ground up: none knows another on its own floor or above. The longest name that fits is a module's."""

Graph = Mapping[str, frozenset[str]]
"""For each module, or room, those it imports."""


def modules(checkout: Path) -> dict[str, Path]:
    """Returns every module below a checkout's folders by the name it is imported by; a package by its own."""
    modules_by_name = {}
    for home, name in HOMES.items():
        for path in sorted((checkout / home).rglob("*.py")):
            if not any(folder.is_symlink() for folder in path.parents):
                parts = path.relative_to(checkout / home).with_suffix("").parts
                modules_by_name[".".join([name, *(part for part in parts if part != "__init__")])] = path
    return modules_by_name


def import_graph(checkout: Path) -> dict[str, frozenset[str]]:
    """Returns for each module those it imports, wherever the import stands and whatever it is for.

    An import inside of a function or for type checkers alone is one too: it says what a module knows.
    """
    files = modules(checkout)
    return {name: frozenset(_imported(name, files) - {name}) for name in files}


def _imported(name: str, files: Mapping[str, Path]) -> set[str]:
    path = files[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return {
        module for said in _said(ast.parse(path.read_bytes()), package) if (module := _module(said, files))
    }


def _said(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def _module(said: str, files: Mapping[str, Path]) -> str | None:
    """Returns the module that holds a dotted name; None if it is none of ours."""
    while said and said not in files:
        said = said.rpartition(".")[0]
    return said or None


def rooms_of(graph: Graph, part: str) -> dict[str, frozenset[str]]:
    """Returns the arrows between the rooms of a package: the folders, and the modules, that stand right below it."""
    below = {
        name: name.removeprefix(f"{part}.").split(".")[0] for name in graph if name.startswith(f"{part}.")
    }
    rooms: dict[str, set[str]] = {name: set() for name in below.values()}
    for name, imported in graph.items():
        if name in below:
            rooms[below[name]] |= {below[other] for other in imported if other in below} - {below[name]}
    return {name: frozenset(others) for name, others in sorted(rooms.items())}


def circles(graph: Graph) -> list[frozenset[str]]:
    """Returns the sets of nodes that reach each other."""
    reached = {name: _reached(graph, name) for name in graph}
    groups = {frozenset({name, *(o for o in reached[name] if name in reached[o])}) for name in graph}
    return sorted((circle for circle in groups if len(circle) > 1), key=sorted)


def _reached(graph: Graph, start: str) -> set[str]:
    reached: set[str] = set()
    ahead = set(graph[start])
    while ahead:
        reached |= ahead
        ahead = {other for name in ahead for other in graph[name]} - reached
    return reached


def floors(graph: Graph) -> list[list[str]]:
    """Returns the nodes by height: each above all it imports, and a circle on one floor."""
    left, placed, stack = set(graph), set[str](), list[list[str]]()
    while left:
        ready = {n for n in left if all(o in placed or n in _reached(graph, o) for o in _reached(graph, n))}
        stack.append(sorted(ready))
        placed |= ready
        left -= ready
    return stack


def _count(graph: Graph) -> int:
    return sum(map(len, graph.values()))


def show(graph: Graph, title: str) -> Iterable[str]:
    """Yields what there is to say of a graph of rooms."""
    stack = floors(graph)
    yield f"{title}: {len(graph)} rooms on {len(stack)} floors with {_count(graph)} arrows"
    for height, rooms in enumerate(stack):
        yield f"  {height}  {', '.join(rooms)}"
    for circle in circles(graph):
        yield f"  circle: {', '.join(sorted(circle))}"


def main() -> None:
    """Prints the figures of a checkout."""
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    graph = import_graph(checkout)
    print(f"{len(graph)} modules with {_count(graph)} imports among them")
    for part in (
        "statekit",
        "statekit.converters",
        "statekit.converters.containers",
        "statekit.converters.layouts",
    ):
        print(*show(rooms_of(graph, part), part), sep="\n")


if __name__ == "__main__":
    main()
