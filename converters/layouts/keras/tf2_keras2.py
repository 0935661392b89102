"""Layout `tf2-keras2`: optimizers of Keras 2 in `tf.train.Checkpoint`, `save_weights` and SavedModels.

    optimizer/_iterations, _learning_rate, _variables/<n>      new optimizers, from TensorFlow 2.11 on
    <variable>/.OPTIMIZER_SLOT/optimizer/m                     legacy ones, with iter, beta_1, decay ... beside

New optimizers list their variables in order, and their names say whose they are; of legacy ones the object graph says
it. A checkpoint has the rate, a legacy one the betas and the decay of the rate too; what else there is to an update
stands in no file. A state goes back into the objects that it came from.

Source: keras-team/keras v2.15.0, keras/optimizers/{optimizer,adam,adafactor}.py, `build`;
keras/optimizers/legacy/optimizer_v2.py, `_restore_slot_variable`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence, dropped_from
from statekit.converters.layouts.hyperparameters import manifest_state
from statekit.converters.layouts.keras import muon, native
from statekit.converters.layouts.keras.graph_optimizer import (
    ITERATIONS,
    RATE_NODE,
    TRAINED,
    VARIABLES,
    GraphOptimizer,
    frozen_keys,
    graph_home,
    tensors_of,
    values_of,
)
from statekit.converters.layouts.keras.home import home_in
from statekit.converters.layouts.keras.lines import keras2_object_lines
from statekit.converters.layouts.keras.named_rows import NamedObjects, found_objects
from statekit.converters.layouts.keras.slot_names import owners
from statekit.converters.layouts.keras.state import (
    HOME,
    HOMES,
    RATE,
    SCHEMAS,
    VARIANT,
    Named,
    Numbered,
    Parts,
    numbered,
    places,
    state_of,
)
from statekit.errors import InexactError, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.evidence import fits_several
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.object_graph import GRAPH, METRICS, Graph
from statekit.tensors.tensor import Tensor, in_memory

_MOMENTS, _FACTORS = {"_momentums", "_velocities"}, {"_r", "_c", "_v"}
_NEVER = {"_u_product", "_average_gradients"}
"""Lists of other optimizers that have momentums and velocities too: Nadam, RMSprop."""
_LEGACY = {"iter", "beta_1", "beta_2"}
_OTHERS = re.compile(r"(?i)(adamax|nadam)(_\d+)?")
"""Names of legacy optimizers that have Adam's slots and betas too; Nadam has a cache besides."""
_ARGUMENTS = ("learning_rate", "decay", "beta_1", "beta_2")


@dataclass(frozen=True)
class Keras2Optimizer:
    """An optimizer of Keras 2 in a checkpoint.

    Attributes:
        objects: It, with key and name of each of its variables in the order of Keras 3, and of what it moves.
        arguments: Key of each argument that is a variable, by its name.
        kind: Its class.
    """

    objects: GraphOptimizer
    arguments: Mapping[str, str]
    kind: str


@dataclass(frozen=True)
class Keras2Graph:
    """Keras 2's own optimizers."""

    name: str = "tf2-keras2"
    title: str = "Keras 2's optimizers in tf.train.Checkpoint and SavedModel"
    containers: tuple[str, ...] = ("tf-bundle",)
    schedule_in: str = "iterations"
    stores_values: bool = True
    only_goes_back: bool = True
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {**dict.fromkeys(("adafactor", "adamw"), (VARIANT,)), native.SCHEMA: ()}
    )

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for the lists or the slots of an optimizer in the object graph."""
        optimizer = _optimizer(checkpoint) or found_objects(checkpoint)
        return Evidence(30, f"an optimizer of Keras 2: {optimizer.kind}") if optimizer else None

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        tree, optimizer = checkpoint.tree, _optimizer(checkpoint)
        if optimizer is None and (other := found_objects(checkpoint)) is not None:
            return _native_state(checkpoint, other, hints, self.name)
        if optimizer is None:
            raise StateError(
                "The checkpoint holds no optimizer of Keras 2 that statekit knows.",
                place=checkpoint.path,
                expected=", ".join(SCHEMAS),
            )
        objects = optimizer.objects
        named = Named(optimizer.kind, _arguments(tree, optimizer), None, True, True)
        rows = tensors_of(tree, objects.variables, checkpoint.path)
        slots = numbered(named.schema, rows, {"rate": False, **_lists(objects)})
        objects = replace(objects, moved=_moved(tree, objects, slots, named.schema, checkpoint.path))
        params = {name: tree[key] for key, name in objects.moved}
        frozen = _frozen(tree, objects)
        order = [*params]
        owned = [
            (None if i is None else order[i], slot)
            for i, slot, _ in places(named.schema, slots.shapes, slots.kept)
        ]
        placed = {name: key for key, name in objects.moved} | frozen
        home = graph_home(tree, objects, placed, owned, self.name)
        home["graph"]["arguments"] = dict(optimizer.arguments)
        parts = Parts(named, slots, params, {name: tree[key] for name, key in frozen.items()}, (), home)
        state = state_of(parts, HOME, manifest_state(checkpoint, named.schema), hints)
        if not _is_renamed(objects):
            return state
        because = f"the slots m and v of a legacy optimizer that is named {objects.name}, and its class is in no file"
        return state.with_facts(lambda facts: [*facts, fits_several(("adam", "adamax"), because)])

    def encode(self, state: TrainState) -> Encoded:
        """Returns the flat tree of keys: the objects that the state came from, with its values."""
        home = home_in(state)
        had = home.get("graph") or {}
        values = native.values_of_slots(state, home, self.name)
        is_same = values.keys() == {(path, slot) for _, path, slot in had.get("own", ())}
        if had.get("layout") != self.name or not is_same or had["places"].keys() != state.params.keys():
            raise InexactError(
                "statekit writes Keras 2's objects only where a state came from them.",
                place=f"layout {self.name}",
                expected="a state of a checkpoint of Keras 2, with its parameters and slots",
                found="another one",
                remedy="write a checkpoint of Keras 3 (--layout tf2-keras)",
            )
        tree = {**had["others"], GRAPH: had["objects"]}
        tree |= {key: values[path, slot] for key, path, slot in had["own"]}
        tree |= {had["places"][path]: tensor for path, tensor in state.params.items()}
        tree |= _changed(state, tree, had["arguments"])
        dropped = dropped_from(state.extra, (HOME,), "tf.train.Checkpoint")
        dropped |= {
            f"extra/{HOME}/{key}": why
            for key, why in HOMES.items()
            if key in home and key not in ("graph", "keras2")
        }
        return Encoded(tree, state.counts.updates, dropped=dropped)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return keras2_object_lines(saved)


def _native_state(
    checkpoint: Checkpoint, optimizer: NamedObjects, hints: CheckpointRef, layout: str
) -> TrainState:
    """Returns the state of an optimizer without a schema, as its objects say it."""
    tree, objects = checkpoint.tree, optimizer.objects
    frozen = _frozen(tree, objects)
    placed = {name: key for key, name in objects.moved} | frozen
    home = graph_home(tree, objects, placed, [(row.path, row.slot) for row in optimizer.rows], layout)
    home["graph"]["arguments"] = optimizer.arguments()
    return muon.class_state(
        optimizer.signature(tree),
        [(row.path, row.slot, tree[row.key]) for row in optimizer.rows],
        ({name: tree[key] for key, name in objects.moved}, {name: tree[key] for name, key in frozen.items()}),
        home,
        checkpoint,
        hints,
    )


def _optimizer(checkpoint: Checkpoint) -> Keras2Optimizer | None:
    """Returns the one optimizer of Keras 2 in a checkpoint; None if there is none."""
    graph = Graph.from_record(checkpoint.meta.get(GRAPH))
    if graph is None or not isinstance(checkpoint.tree, Mapping) or GRAPH not in checkpoint.tree:
        return None
    candidates = (_new(graph, i) or _legacy(graph, i) for i in range(len(graph.nodes)))
    optimizers = filter(None, candidates)
    optimizer = next(optimizers, None)
    if next(optimizers, None) is not None:  # each that is made costs as much as it lists
        raise StateError(
            "The checkpoint holds several optimizers of Keras.", place=checkpoint.path, found="two or more"
        )
    return optimizer


def _new(graph: Graph, node: int) -> Keras2Optimizer | None:
    """Returns a new optimizer of Keras 2 at a node; None if it is none."""
    children = graph.nodes[node].children
    # Keras 3 lists what it moves, and other optimizers have lists of their own.
    if not {VARIABLES, ITERATIONS} <= children.keys() or children.keys() & {TRAINED, *_NEVER}:
        return None
    variables = values_of(graph, children[VARIABLES])
    is_factored, is_adam = children.keys() >= _FACTORS, children.keys() >= _MOMENTS
    if len(variables) < 2 or not (is_factored or is_adam):
        return None
    prefix = variables[1][1].partition("/")[0]
    kind = "Adafactor" if is_factored else prefix if prefix in ("Adam", "AdamW") else "AdamW"
    return Keras2Optimizer(
        GraphOptimizer(graph, node, prefix, variables, ()),
        _variable_keys(graph, node, {RATE_NODE: RATE}),
        kind,
    )


def _legacy(graph: Graph, node: int) -> Keras2Optimizer | None:
    """Returns a legacy Adam at a node, its slots in the order of Keras 3; None if it is none."""
    by_kind: dict[str, dict[int, int]] = {"m": {}, "v": {}, "vhat": {}}
    for slot in graph.nodes[node].slots:
        by_kind.setdefault(slot.name, {})[slot.variable] = slot.node
    first, second, maxima = by_kind["m"], by_kind["v"], by_kind["vhat"]
    children = graph.nodes[node].children
    is_adam = children.keys() >= _LEGACY and "momentum_cache" not in children and len(by_kind) == 3
    if not is_adam or not first or first.keys() != second.keys() or _OTHERS.fullmatch(_name(graph, node)):
        return None
    pairs = [slot for param in first for slot in (first[param], second[param])]
    variables = _values(graph, [children["iter"], *pairs, *maxima.values()])
    params = _values(graph, first)
    keys = _variable_keys(graph, node, {name: name for name in _ARGUMENTS})
    return Keras2Optimizer(GraphOptimizer(graph, node, _name(graph, node), variables, params), keys, "Adam")


def _name(graph: Graph, node: int) -> str:
    """Returns what a legacy optimizer calls itself in the name of its count."""
    count = graph.nodes[graph.nodes[node].children["iter"]].variable
    return count.full_name.partition("/")[0] if count is not None else ""


def _is_renamed(objects: GraphOptimizer) -> bool:
    """Tells whether a legacy optimizer, which the graph gives slots, has another name than Keras gives Adam."""
    is_legacy = bool(objects.graph.nodes[objects.node].slots)
    return is_legacy and re.fullmatch(r"Adam(_\d+)?|", objects.name) is None


def _values(graph: Graph, nodes: Iterable[int]) -> tuple[tuple[str, str], ...]:
    """Returns key and name of each variable of some nodes."""
    values = (graph.nodes[node].variable for node in nodes)
    return tuple((value.key, value.full_name) for value in values if value is not None)


def _variable_keys(graph: Graph, node: int, names: Mapping[str, str]) -> dict[str, str]:
    """Returns the key of each argument that is a variable, by its name."""
    keys = {}
    for child, name in names.items():
        at = graph.child(node, child)
        value = None if at is None else graph.nodes[at].variable
        if value is not None:
            keys[name] = value.key
    return keys


def _arguments(tree: Mapping[str, Any], optimizer: Keras2Optimizer) -> dict[str, float]:
    tensors = {name: tree.get(key) for name, key in optimizer.arguments.items()}
    return {
        name: float(tensor.read())
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor) and tensor.shape == () and tensor.dtype.kind in "fiu"
    }


def _changed(state: TrainState, tree: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns the arguments that the state has another value of than the checkpoint that it came from, by key."""
    groups = state.optimizer.groups
    group = groups[0].hyperparameters if groups else {}
    # A schedule's value at this step is inferred; the checkpoint has the schedule's base.
    given = {name: value for name, value in group.items() if groups[0].known_from.get(name) != "inferred"}
    schema = state.optimizer.schema  # nothing is changed of an optimizer without one
    values = {} if schema == native.SCHEMA else load_schema(schema).native(VARIANT, given)
    changed: dict[str, Tensor] = {}
    for name, key in keys.items():
        value = values.get(name)
        if isinstance(value, float) and float(tree[key].read()) != value:
            changed[key] = in_memory(np.asarray(value, np.float32), key)
    return changed


def _frozen(tree: Mapping[str, Any], objects: GraphOptimizer) -> dict[str, str]:
    """Returns names and keys of the variables of the model that the optimizer doesn't move; none of metrics."""
    inside, waiting = set[int](), [objects.node]
    while waiting:
        node = waiting.pop()
        inside.add(node)
        waiting += {*objects.graph.nodes[node].children.values()} - inside
    inner = {value.key for i in inside if (value := objects.graph.nodes[i].variable) is not None}
    frozen = frozen_keys(tree, objects)
    return {name: key for name, key in frozen.items() if key not in inner and METRICS not in f"/{key}"}


def _lists(objects: GraphOptimizer) -> dict[str, bool]:
    """Returns what a new optimizer is known to keep, by its lists; a legacy one's slots tell it."""
    kept = objects.kept()
    if objects.moved:
        return {"average": False, "accumulate": False}
    return {"average": kept.average, "accumulate": False, "amsgrad": kept.amsgrad}


def _moved(
    tree: Mapping[str, Any], objects: GraphOptimizer, slots: Numbered, schema: str, place: object
) -> tuple[tuple[str, str], ...]:
    """Returns key and name of each parameter that an optimizer moves, in its order."""
    if objects.moved:
        return objects.moved
    slot_names = [name for _, name, _ in places(schema, slots.shapes, slots.kept)]
    second = [
        (name, tree[key].shape)
        for (key, name), slot in zip(objects.variables, slot_names, strict=True)
        if slot == "v"
    ]
    keys = _model_keys(tree, objects)
    names = owners(second, {name: tree[key].shape for name, key in keys.items()})
    if names is None:
        raise StateError(
            "The names of the optimizer's variables do not name their parameters.",
            place=place,
            found=", ".join(name for name, _ in second[:10]),
            remedy="read the model's .h5 or .keras file, or take the weights alone: --params-only",
        )
    return tuple((keys[name], name) for name in names)


def _model_keys(tree: Mapping[str, Any], objects: GraphOptimizer) -> dict[str, str]:
    """Returns the key of each variable that is none of the optimizer's, by its name."""
    inner = {key for key, _ in objects.variables}
    values: Sequence[Any] = [node.variable for node in objects.graph.nodes]
    return {
        value.full_name: value.key
        for value in values
        if value is not None and value.key not in inner and isinstance(tree.get(value.key), Tensor)
    }


LAYOUT = Keras2Graph()
