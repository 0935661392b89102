"""Optimizers without a schema in files that name their variables: Keras 2's objects, and whole-model .h5 files.

Input: the names of an optimizer's variables, or the objects of a `tf.train.Checkpoint`; output: for each variable its
parameter and what it is. A variable that belongs to no parameter, as Nadam's product, stays with the optimizer.

Source: keras-team/keras v2.15.0, keras/optimizers/optimizer.py, `add_variable_from_reference`, and
keras/optimizers/legacy/optimizer_v2.py, `_create_hypers`, `add_slot`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from statekit.converters.layouts.keras.graph_optimizer import (
    ITERATIONS,
    RATE_NODE,
    TRAINED,
    VARIABLES,
    GraphOptimizer,
    values_of,
)
from statekit.converters.layouts.keras.native import Signature, signature_of
from statekit.converters.layouts.keras.slot_names import slot_of
from statekit.converters.layouts.keras.state import ITERATION, RATE, SCHEMAS, class_and_config
from statekit.errors import Faults, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.tensors.object_graph import GRAPH, METRICS, Graph
from statekit.tensors.tensor import Tensor

_COUNT, _DECAY = "iter", "decay"
"""What each legacy optimizer has as objects."""
_NODES = {ITERATIONS: ITERATION, _COUNT: ITERATION, RATE_NODE: RATE}
_BY_LISTS = (
    ({"_u_product"}, "Nadam"),
    ({"_average_gradients"}, "RMSprop"),
    ({"_m", "_u"}, "Adamax"),
    ({"_accumulators", "_linears"}, "Ftrl"),
    ({"_accumulated_grads", "_accumulated_delta_vars"}, "Adadelta"),
    ({"_accumulators"}, "Adagrad"),
)
"""What no other class of Keras 2 holds, and the class."""


def config_signature(config: Any, is_keras2: bool) -> Signature | None:
    """Returns the optimizer without a schema that a model's config names; None if it names none."""
    compiled = config.get("compile_config") if isinstance(config, Mapping) else None
    record = compiled.get("optimizer") if isinstance(compiled, Mapping) else None
    if not isinstance(record, Mapping) or not isinstance(record.get("class_name"), str):
        return None
    kind, settings = class_and_config(record)
    return None if kind in SCHEMAS or settings is None else signature_of(kind, settings, is_keras2)


class NamedRow(NamedTuple):
    """A variable of an optimizer: its place, its name, its slot, and its parameter, or None if it has none."""

    key: str
    full_name: str
    path: str | None
    slot: str


def named_row(key: str, full_name: str, params: Sequence[str]) -> NamedRow:
    """Returns a variable of an optimizer with its parameter and its slot, which its name gives."""
    path, slot = slot_of(full_name, params)
    is_count = path is None and slot in (ITERATION, _COUNT)
    return NamedRow(key, full_name, path, ITERATION if is_count else slot)


def check_rows(rows: Sequence[NamedRow], place: object) -> None:
    """Checks that no two variables are the same of one parameter.

    Raises:
        StateError: Some are; lists all.
    """
    counts = Counter((row.path, row.slot) for row in rows)
    Faults(
        (f"has several variables called {slot}", path or "the optimizer")
        for (path, slot), count in counts.items()
        if count > 1
    ).check(
        StateError,
        "The names of the optimizer's variables don't tell them apart",
        place=place,
        remedy="take the weights alone: --params-only",
    )


@dataclass(frozen=True)
class NamedObjects:
    """An optimizer of Keras 2 as objects of a checkpoint.

    Attributes:
        objects: The optimizer, with key and name of each of its variables and of each parameter that it moves.
        rows: Its variables.
        kind: The optimizer's class, or its name where the class is unknown.
    """

    objects: GraphOptimizer
    rows: tuple[NamedRow, ...]
    kind: str

    def arguments(self) -> dict[str, str]:
        """Returns the key of each argument that is a variable, by its name."""
        return {row.slot: row.key for row in self.rows if row.path is None and row.slot != ITERATION}

    def signature(self, tree: Mapping[str, Any]) -> Signature:
        """Returns its class, with the arguments that are numbers of the checkpoint."""
        values = {name: tree[key] for name, key in self.arguments().items()}
        settings = {name: float(tensor.read()) for name, tensor in values.items() if not tensor.shape}
        return Signature(self.kind, settings, is_keras2=True)


def found_objects(checkpoint: Checkpoint) -> NamedObjects | None:
    """Returns the one optimizer of Keras 2 in a checkpoint, whatever its class; None if there is none, or several.

    Raises:
        StateError: The names of its variables don't tell them apart.
    """
    graph = Graph.from_record(checkpoint.meta.get(GRAPH))
    if graph is None or not isinstance(checkpoint.tree, Mapping) or GRAPH not in checkpoint.tree:
        return None
    nodes = [i for i in range(len(graph.nodes)) if _is_new(graph, i) or _is_legacy(graph, i)]
    if len(nodes) != 1:
        return None
    (node,) = nodes
    rows, model = _rows(graph, node, checkpoint.tree)
    check_rows(rows, checkpoint.path)
    moved = dict.fromkeys(row.path for row in rows if row.path is not None)
    if not moved.keys() <= model.keys() or not _are_stored(checkpoint.tree, rows):
        return None
    # One without slots says of no variable that it moves it.
    params = tuple((model[path], path) for path in moved or model)
    name = _name(rows)
    variables = tuple((row.key, row.full_name) for row in rows)
    return NamedObjects(GraphOptimizer(graph, node, name, variables, params), rows, _kind(graph, node, name))


def _rows(graph: Graph, node: int, tree: Mapping[str, Any]) -> tuple[tuple[NamedRow, ...], dict[str, str]]:
    """Returns an optimizer's variables, and the key of each of the model's by its name."""
    scalars, slots = _scalars(graph, node), _slots(graph, node)
    listed = dict(values_of(graph, graph.nodes[node].children[VARIABLES])) if _is_new(graph, node) else {}
    taken = {row.key for row in scalars}
    model = _model_keys(graph, tree, taken | listed.keys() | {row.key for row in slots})
    slots += [named_row(key, name, [*model]) for key, name in listed.items() if key not in taken]
    return (*scalars, *slots), model


def _are_stored(tree: Mapping[str, Any], rows: Sequence[NamedRow]) -> bool:
    return all(isinstance(tree.get(row.key), Tensor) for row in rows)


def _kind(graph: Graph, node: int, name: str) -> str:
    """Returns the class of an optimizer, which its lists tell or its name."""
    children = graph.nodes[node].children.keys()
    return next((kind for lists, kind in _BY_LISTS if lists <= children), name or "optimizer")


def _is_new(graph: Graph, node: int) -> bool:
    children = graph.nodes[node].children
    return {VARIABLES, ITERATIONS} <= children.keys() and TRAINED not in children


def _is_legacy(graph: Graph, node: int) -> bool:
    optimizer = graph.nodes[node]
    return _COUNT in optimizer.children and (bool(optimizer.slots) or _DECAY in optimizer.children)


def _scalars(graph: Graph, node: int) -> list[NamedRow]:
    """Returns what an optimizer has as attributes: its count, arguments, and what is of no parameter."""
    children = ((name, graph.nodes[i].variable) for name, i in graph.nodes[node].children.items())
    return [
        NamedRow(value.key, value.full_name, None, _NODES.get(name, name))
        for name, value in children
        if value is not None
    ]


def _slots(graph: Graph, node: int) -> list[NamedRow]:
    """Returns the slots of a legacy optimizer, whose parameters the object graph says."""
    pairs = [
        (slot.name, graph.nodes[slot.node].variable, graph.nodes[slot.variable].variable)
        for slot in graph.nodes[node].slots
    ]
    return [
        NamedRow(stored.key, stored.full_name, param.full_name, name)
        for name, stored, param in pairs
        if stored is not None and param is not None
    ]


def _name(rows: Sequence[NamedRow]) -> str:
    """Returns what an optimizer calls itself: in the name of its count, or of a slot."""
    counts = [row.full_name.rpartition("/")[0] for row in rows if row.slot == ITERATION]
    # Below a loss scale names begin with the slot.
    slots = [row.full_name.removeprefix(row.slot).partition("/")[0] for row in rows if row.path is not None]
    return next((name for name in (*counts, *slots) if name), "")


def _model_keys(graph: Graph, tree: Mapping[str, Any], inner: set[str]) -> dict[str, str]:
    """Returns the key of each variable of floats that is none of the optimizer's, nor of metrics, by its name."""
    values = [node.variable for node in graph.nodes if node.variable is not None]
    floats = [
        value
        for value in values
        if isinstance(tensor := tree.get(value.key), Tensor) and tensor.dtype.kind in "fV"
    ]
    return {
        value.full_name: value.key
        for value in floats
        if value.key not in inner and METRICS not in f"/{value.key}"
    }
