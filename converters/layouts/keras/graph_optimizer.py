"""The objects of a `tf.train.Checkpoint` with an optimizer of Keras 3: found in its graph, put back, or made anew.

Source: tensorflow/tensorflow, python/checkpoint/checkpoint.py; keras-team/keras,
keras/src/backend/tensorflow/optimizer.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.conversion.contracts import Encoded, dropped_from
from statekit.converters.layouts.keras.home import INNER
from statekit.converters.layouts.keras.state import (
    ACCUMULATOR,
    AVERAGE,
    HOME,
    HOMES,
    ITERATION,
    RATE,
    Kept,
    order_of,
)
from statekit.converters.layouts.keras.variables import CONFIG, keyed_layers
from statekit.errors import Faults, StateError
from statekit.files.checkpoint import ATTRIBUTES, Checkpoint
from statekit.state.train_state import TrainState
from statekit.tensors.object_graph import GRAPH, SAVE_COUNTER, SUFFIX, Builder, Graph
from statekit.tensors.tensor import Tensor, in_memory

VARIABLES, TRAINED = "_variables", "_trainable_variables"
RATE_NUMBER = 1
"""The place of the rate among an optimizer's variables; statekit leaves it empty where no rate is known."""
ITERATIONS, RATE_NODE = "_iterations", "_learning_rate"
BASE_LISTS = {AVERAGE: "_model_variables_moving_average", ACCUMULATOR: "_accumulated_gradients"}


_OPERATIONS = {"Functional": ("_operations",), "Sequential": ("_functional", "_operations")}
"""Class of a model -> where it holds its layers by number."""


@dataclass(frozen=True)
class GraphOptimizer:
    """An optimizer in a checkpoint.

    Attributes:
        graph: The objects.
        node: Its number.
        name: What it is called, as its variables' names begin.
        variables: Key and name of each of its variables, in their order.
        moved: Key and name of each parameter that it moves, in their order.
    """

    graph: Graph
    node: int
    name: str
    variables: tuple[tuple[str, str], ...]
    moved: tuple[tuple[str, str], ...]

    def has(self, child: str) -> bool:
        """Tells whether the optimizer has something of this name."""
        return child in self.graph.nodes[self.node].children

    @property
    def by_path(self) -> bool:
        """Whether slots are named `<optimizer>/<path>/<slot>`, which Keras' own optimizers never do."""
        slots = (name.removeprefix(f"{self.name}/").rpartition("/")[0] for _, name in self.variables)
        return (
            not self.has("_momentums") and not self.has("_r") and bool({*slots} - {""}) and bool(self.moved)
        )

    def kept(self) -> Kept:
        """Returns what it keeps besides its slots."""
        rate = self.graph.child(self.node, RATE_NODE)
        return Kept(
            rate is not None and self.graph.nodes[rate].variable is not None,
            self.has(BASE_LISTS[AVERAGE]),
            self.has(BASE_LISTS[ACCUMULATOR]),
            self.has("_velocity_hats"),
        )


def found_optimizer(checkpoint: Checkpoint) -> GraphOptimizer | None:
    """Returns the one optimizer of Keras 3 in a checkpoint; None if there is none.

    Raises:
        StateError: There are several.
    """
    graph = Graph.from_record(checkpoint.meta.get(GRAPH))
    if graph is None or not isinstance(checkpoint.tree, Mapping) or GRAPH not in checkpoint.tree:
        return None
    wanted = {VARIABLES, TRAINED, ITERATIONS}
    optimizers = [i for i, node in enumerate(graph.nodes) if wanted <= node.children.keys()]
    inside = [graph.nodes[i].children.get(INNER) for i in optimizers]
    around = {*optimizers}
    optimizers = [i for i, inner in zip(optimizers, inside, strict=True) if inner not in around]
    if len(optimizers) > 1:
        raise StateError(
            "The checkpoint holds several optimizers of Keras.",
            place=checkpoint.path,
            found=f"{len(optimizers)} of them",
        )
    if not optimizers:
        return None
    children = graph.nodes[optimizers[0]].children
    variables = values_of(graph, children[VARIABLES], RATE_NUMBER)
    moved = values_of(graph, children[TRAINED])
    step = graph.nodes[children[ITERATIONS]].variable
    if step is None or not variables or not moved:
        return None
    return GraphOptimizer(graph, optimizers[0], step.full_name.rpartition("/")[0], variables, moved)


def values_of(graph: Graph, node: int, absent: int | None = None) -> tuple[tuple[str, str], ...]:
    """Returns key and name of each variable in a list.

    Args:
        graph: The graph.
        node: The list.
        absent: The number that may be missing.

    Raises:
        StateError: A number of the list is missing, or stands for no variable.
    """
    items = graph.items(node)
    values = [graph.nodes[item].variable for item in items]
    numbers = [*range(len(items))]
    if absent is not None and graph.child(node, f"{absent}") is None:
        numbers = [i for i in range(len(items) + 1) if i != absent]
    if None in values or [graph.child(node, f"{i}") for i in numbers] != [*items]:
        raise StateError(
            "A list of an optimizer's variables has gaps.",
            expected=f"a variable at each number below {len(items)}",
            found=", ".join(sorted(graph.nodes[node].children, key=len)[:20]),
        )
    return tuple((value.key, value.full_name) for value in values if value is not None)


def frozen_keys(tree: Mapping[str, Any], optimizer: GraphOptimizer) -> dict[str, str]:
    """Returns names and keys of the model's variables that the optimizer doesn't move.

    Where several have one name, as layers of two models may, each is called by its place.
    """
    taken = {key for key, _ in (*optimizer.variables, *optimizer.moved)}
    values = (node.variable for node in optimizer.graph.nodes)
    frozen = [
        value
        for value in values
        if value is not None
        and value.key not in taken
        and isinstance(tree.get(value.key), Tensor)
        and tree[value.key].dtype.kind in "fV"
    ]
    names = Counter([name for _, name in optimizer.moved] + [value.full_name for value in frozen])
    return {
        value.full_name if names[value.full_name] == 1 else value.key.removesuffix(SUFFIX): value.key
        for value in frozen
    }


def tensors_of(tree: Mapping[str, Any], rows: Sequence[tuple[str, str]], place: object) -> list[Tensor]:
    """Returns the values of variables, given by key and name.

    Raises:
        StateError: The checkpoint lacks some; lists every one.
    """
    faults = Faults(
        ("isn't there, or no array", key) for key, _ in rows if not isinstance(tree.get(key), Tensor)
    )
    faults.check(StateError, "The object graph speaks of values that there aren't", place=place)
    return [tree[key] for key, _ in rows]


def graph_home(
    tree: Mapping[str, Any],
    optimizer: GraphOptimizer,
    placed: Mapping[str, str],
    owners: Sequence[tuple[str | None, str]],
    layout: str,
) -> dict[str, Any]:
    """Returns the objects of a checkpoint, and where in it everything lies.

    Args:
        tree: The checkpoint's.
        optimizer: Its optimizer.
        placed: Key of each parameter.
        owners: For each of the optimizer's variables, its parameter's path, and what it is.
        layout: Who reads them.
    """
    taken = {*placed.values(), *(key for key, _ in optimizer.variables), GRAPH}
    variables = [
        [key, path, slot] for (key, _), (path, slot) in zip(optimizer.variables, owners, strict=True)
    ]
    others = {key: value for key, value in tree.items() if key not in taken}
    home = {"objects": tree[GRAPH], "places": dict(placed), "own": variables, "others": others}
    return {"graph": {**home, "layout": layout}}


@dataclass(frozen=True)
class Row:
    """One of an optimizer's variables: its parameter's path, what it is, its name, its value."""

    path: str | None
    what: str
    full_name: str
    tensor: Tensor


def encoded_graph(
    state: TrainState,
    home: Mapping[str, Any],
    name: str,
    lists: Mapping[str, str],
    rows: Sequence[Row],
    silent: bool,
    layout: str,
) -> Encoded:
    """Returns the tree of a checkpoint: with the objects that it had if it had all these, else with new ones.

    Args:
        state: The state.
        home: What it has from files of Keras.
        name: What the optimizer is called.
        lists: Slot -> the optimizer's list of them.
        rows: The optimizer's variables in their order.
        silent: Whether the learning rate, the second of them, is left out.
        layout: Who writes: another layout's objects have other names.
    """
    order = order_of(state)
    moved = {*order}
    frozen = [path for path in state.params if path not in moved]
    dropped = dropped_from(state.extra, (HOME,), "tf.train.Checkpoint")
    for part, reason in HOMES.items():
        if part in home and part != "graph":
            dropped[f"extra/{HOME}/{part}"] = reason
    had = home.get("graph")
    had = had if had and had.keys() >= {"layout", "others", "objects", "own", "places"} else None
    if had and had["layout"] == layout and not silent and _same(had, order, frozen, rows):
        tree = {**had["others"], GRAPH: had["objects"]}
        tree |= {key: row.tensor for (key, _, _), row in zip(had["own"], rows, strict=True)}
        tree |= {had["places"][path]: tensor for path, tensor in state.params.items()}
        return Encoded(tree, state.counts.updates, dropped=dropped)
    if had:
        dropped[f"extra/{HOME}/graph"] = "the objects are new ones"
    tree = _new(state, home, name, lists, rows, silent)
    return Encoded(tree, state.counts.updates, dropped=dropped)


def _same(had: Mapping[str, Any], order: Sequence[str], frozen: Sequence[str], rows: Sequence[Row]) -> bool:
    rows_had = [(path, slot) for _, path, slot in had["own"]]
    return {*had["places"]} == {*order, *frozen} and rows_had == [(row.path, row.what) for row in rows]


def _new(
    state: TrainState,
    home: Mapping[str, Any],
    name: str,
    lists: Mapping[str, str],
    rows: Sequence[Row],
    silent: bool,
) -> dict[str, Any]:
    order = order_of(state)
    numbers = {path: i for i, path in enumerate(order)}
    builder, tree = Builder(), dict[str, Any]()
    optimizer = builder.at(("optimizer",))
    builder.add(builder.at(("model",)), "optimizer", optimizer)
    trained = builder.add(optimizer, TRAINED)
    for i, path in enumerate(order):
        key = f"optimizer/{TRAINED}/{i}"
        node = builder.free(path, key)
        builder.add(trained, str(i), node)
        _model_place(builder, path, node)
        tree[key + SUFFIX] = state.params[path]
    for path, tensor in state.params.items():
        if path not in numbers:
            key = f"model/{path}"
            node = builder.free(path, key)
            _model_place(builder, path, node)
            if (inside := _in_layers(home, path)) is not None:
                layer, name = builder.at(("model", *inside)), path.rpartition("/")[2]
                builder.add(layer, name, node)
                # Kernels and embeddings are properties of what is stored.
                builder.add(layer, f"_{name}", node)
            tree[key + SUFFIX] = tensor
    variables = builder.add(optimizer, VARIABLES)
    attributes = {ITERATION: ITERATIONS, RATE: RATE_NODE}
    for number, row in enumerate(rows):
        if silent and row.what == RATE and row.path is None:
            continue
        alone = attributes.get(row.what) if row.path is None else None
        key = f"optimizer/{alone}" if alone else f"optimizer/{VARIABLES}/{number}"
        node = builder.free(row.full_name, key)
        builder.add(variables, str(number), node)
        if alone:
            builder.add(optimizer, alone, node)
        elif row.path in numbers and (listed := {**lists, **BASE_LISTS}.get(row.what)):
            above = builder.at(("optimizer", listed))
            builder.add(above, str(numbers[row.path]), node)
        tree[key + SUFFIX] = row.tensor
    builder.variable(0, SAVE_COUNTER, SAVE_COUNTER, SAVE_COUNTER)
    tree[SAVE_COUNTER + SUFFIX] = in_memory(np.asarray(1, np.int64), SAVE_COUNTER)
    return {**tree, GRAPH: builder.done().to_record()}


def _in_layers(home: Mapping[str, Any], path: str) -> tuple[str, ...] | None:
    """Returns where a Functional or Sequential model holds a variable's layer, if its config is known.

    Source: keras-team/keras, keras/src/models/{functional,sequential}.py.
    """
    config = home.get("tree", {}).get(ATTRIBUTES, {}).get(CONFIG)
    keys = home.get("places", {}).get(path, ())[:-2]
    place: tuple[str, ...] = ()
    while keys[:1] == ["layers"] and isinstance(config, Mapping) and config.get("class_name") in _OPERATIONS:
        layers = config["config"]["layers"]
        layer = keyed_layers(layers).get(keys[1])
        number = next((i for i, other in enumerate(layers) if other is layer), None)
        if number is None:
            return None
        place = (*place, *_OPERATIONS[config["class_name"]], str(number))
        config, keys = layer, keys[2:]
    return (*place, *keys) if place else None


def _model_place(builder: Builder, path: str, node: int) -> None:
    """Puts a variable below the model by its path, unless that would lead into the optimizer."""
    parts = path.split("/")
    if parts[0] != "optimizer":
        builder.add(builder.at(("model", *parts[:-1])), parts[-1], node)
