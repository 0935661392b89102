"""Imports go one way: each room knows only what stands on lower floors, and converters are reached by the registry."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from import_graph import FLOORS, Graph, circles, import_graph, modules, rooms_of
from statekit.state.schema import load_schema, schema_names

ROOT = Path(__file__).parents[1]
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


class Ban(NamedTuple):
    """What a room must not know although it stands below, and what of it is no secret."""

    room: str
    unknown: tuple[str, ...]
    but: tuple[str, ...] = ()


BANS = (
    Ban(  # bytes only: nothing of optimizers, nor of what a checkpoint is converted to
        "statekit.converters.formats",
        ("statekit.state", "statekit.arrays", "statekit.optim", "statekit.conversion"),
    ),
    Ban(
        "statekit.converters.containers", ("statekit.state", "statekit.arrays", "statekit.optim")
    ),  # no slots
    Ban(  # no files; what a container has opened is a Checkpoint
        "statekit.converters.layouts",
        ("statekit.converters.formats", "statekit.files"),
        but=("statekit.files.checkpoint", "statekit.files.tree"),  # the last has the names of places
    ),
    *(  # by the registry alone
        Ban(room, ("statekit.converters",))
        for room in HEIGHT
        if room != "statekit.cli" and not room.startswith("statekit.converters")
    ),
)
LOADERS = {
    "statekit.arrays.backend": "the module of a framework, in the same room",
    "statekit": "the modules of the names it offers, each also imported for type checkers",
    "statekit.cli.main": "the module of a verb, in the same room",
    "statekit.verify.natives": "the module that runs a class, in the same room",
}
"""Modules that import others by a name which this test can't read."""


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def room_of(module: str) -> str:
    """Returns the room of a module; of `statekit` itself, nothing but its own `__init__` is in it."""
    fitting = [room for room in HEIGHT if within(module, room) and (room != "statekit" or module == room)]
    assert fitting, f"{module} is in no room: name one in FLOORS"
    return max(fitting, key=len)


def forbidden(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yields who knows whom against the one direction."""
    for module, imported in sorted(graph.items()):
        room = room_of(module)
        for other in sorted(imported):
            upward = room_of(other) != room and HEIGHT[room_of(other)] >= HEIGHT[room]
            banned = any(
                ban.room == room
                and any(within(other, name) for name in ban.unknown)
                and not any(within(other, name) for name in ban.but)
                for ban in BANS
            )
            if upward or banned:
                yield module, other


def read(checkout: Path) -> Graph:
    """Returns who imports whom, less the package that only holds the converters' rooms together."""
    return {name: known for name, known in import_graph(checkout).items() if name != "statekit.converters"}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return read(ROOT)


def test_imports_go_one_way(graph: Graph) -> None:
    assert list(forbidden(graph)) == []


@pytest.mark.parametrize(
    "part",
    [
        "statekit",
        "statekit.converters",
        "statekit.converters.formats",
        "statekit.converters.containers",
        "statekit.converters.layouts",
    ],
)
def test_no_rooms_know_each_other_in_a_circle(graph: Graph, part: str) -> None:
    assert circles(rooms_of(graph, part)) == []


def test_no_modules_know_each_other_in_a_circle(graph: Graph) -> None:
    assert circles(graph) == []


def slots_named(text: str) -> set[str]:
    """Returns the slots that a module names, in any system's words; single letters may mean anything."""
    known = {
        str(alias)
        for schema in map(load_schema, schema_names())
        for slot, spec in schema.slots.items()
        for alias in (slot, *spec.aliases.values())
        if len(str(alias)) > 1
    }
    constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)} & known


def test_containers_and_formats_name_no_slots() -> None:
    rooms = ("statekit.converters.containers", "statekit.converters.formats")
    files = [path for name, path in modules(ROOT).items() if any(within(name, room) for room in rooms)]
    assert {path: named for path in files if (named := slots_named(path.read_text(encoding="utf-8")))} == {}


def test_a_slot_that_is_named_is_noticed() -> None:
    assert slots_named("KEY = 'exp_avg_sq_row'\nORDER = 'c'\n") == {"exp_avg_sq_row"}


def test_modules_that_are_loaded_by_a_made_up_name_are_known() -> None:
    loading = {
        name for name, path in modules(ROOT).items() if "import_module(" in path.read_text(encoding="utf-8")
    }
    assert loading == set(LOADERS)


SEEDED = {
    "an arrow up": ("statekit/tensors/views.py", "from statekit.state import schema"),
    "an arrow to a room beside it": ("statekit/torch/options.py", "import statekit.jax.states"),
    "an arrow inside of a function": (
        "statekit/state/schema.py",
        "def f():\n    from statekit.optim import run\n",
    ),
    "an arrow for types alone": (
        "statekit/files/stage.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from statekit.optim.run import Move\n",
    ),
    "a relative arrow": ("statekit/files/stage.py", "from ..optim.run import Move"),
    "a converter that the registry doesn't load": (
        "statekit/conversion/plan.py",
        "from statekit.converters.containers import t5x",
    ),
    "a container that knows a layout": (
        "converters/containers/t5x.py",
        "from statekit.converters.layouts.optax import layout",
    ),
    "a container that knows slots": ("converters/containers/t5x.py", "import statekit.state.train_state"),
    "a layout that knows files": (
        "converters/layouts/optax/layout.py",
        "from statekit.converters.formats import zarr",
    ),
    "a layout that reads bytes": ("converters/layouts/optax/layout.py", "import statekit.files.stage"),
    "a format that knows a container": (
        "converters/formats/zarr/v2.py",
        "from statekit.converters.containers import t5x",
    ),
    "a front door that somebody below walks in by": (
        "statekit/verify/replay.py",
        "import statekit",
    ),
}
MODULES = (
    "statekit/__init__.py", "statekit/state/schema.py", "statekit/optim/run.py", "statekit/files/stage.py",
    "statekit/jax/states.py", "statekit/state/train_state.py", "converters/containers/t5x.py",
    "converters/layouts/optax/layout.py", "converters/formats/zarr/v2.py",
)  # fmt: skip


@pytest.mark.parametrize("fault", SEEDED)
def test_an_arrow_against_the_direction_is_noticed(fault: str, tmp_path: Path) -> None:
    for name in MODULES:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in file.relative_to(tmp_path).parents[:-1]:
            (tmp_path / folder / "__init__.py").touch()
        file.touch()
    assert list(forbidden(read(tmp_path))) == []
    place, text = SEEDED[fault]
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text(text)
    assert len(list(forbidden(read(tmp_path)))) == 1


def test_a_circle_is_noticed() -> None:
    graph = {"p.a.x": {"p.b.y"}, "p.b.y": {"p.c"}, "p.b.z": set[str](), "p.c": {"p.a.x"}, "p.d": {"p.a.x"}}
    rooms = rooms_of({name: frozenset(known) for name, known in graph.items()}, "p")
    assert circles(rooms) == [frozenset("abc")]
