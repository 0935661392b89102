"""Optimizers of Keras 3 in `tf.train.Checkpoint`: layouts `tf2-keras` and `tf2-statekit`, of statekit.tensorflow's own.

    optimizer/_variables/<n>/.ATTRIBUTES/VARIABLE_VALUE             step, rate, slots, in the order of their making
    optimizer/_trainable_variables/<n>/.ATTRIBUTES/VARIABLE_VALUE   the parameters that it moves
    model/...                                                       what it doesn't

Keys are the shortest ways through the objects; which variable is what, the object graph says, and each variable's name.
TensorFlow restores by those ways: a state from elsewhere has the optimizer's lists, and each parameter below `model` by
its path. Where nobody said the learning rate, its place is left out, and a restored optimizer keeps its own.

Source: tensorflow/tensorflow, python/checkpoint/checkpoint.py; keras-team/keras,
keras/src/backend/tensorflow/optimizer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statekit.conversion.contracts import Encoded, Evidence, Hints
from statekit.converters.layouts.hyperparameters import manifest_state
from statekit.converters.layouts.keras.layout import home_in
from statekit.converters.layouts.keras.objects import (
    BASE_LISTS,
    ITERATIONS,
    TRAINED,
    VARIABLES,
    Found,
    Row,
    encoded_graph,
    found_optimizer,
    frozen_keys,
    graph_home,
    tensors_of,
    values_of,
)
from statekit.converters.layouts.keras.slots import (
    ACCUMULATOR,
    AVERAGE,
    ITERATION,
    RATE,
    numbered,
    places,
)
from statekit.converters.layouts.keras.state import (
    HOME,
    SCHEMAS,
    VARIANT,
    Named,
    Parts,
    by_name,
    kind_of,
    order_of,
    rate_of,
    state_of,
    usual_name,
    variables_of,
)
from statekit.converters.layouts.keras.statekit_keras_state import (
    CLASSES,
    SEPARATOR,
    Own,
    named_slots,
    own_by_name,
    own_state,
    own_variables,
    paths_of,
)
from statekit.errors import StateError, fault_list
from statekit.files.checkpoint import Checkpoint
from statekit.optim.run import stepped_variants
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor

_MOMENTS = {"m": "_momentums", "v": "_velocities", "v_max": "_velocity_hats"}
LISTS = {"adafactor": {"v_row": "_r", "v_col": "_c", "v": "_v"}, "adamw": _MOMENTS, "lamb": _MOMENTS}
_SHOWN = 40


@dataclass(frozen=True)
class KerasGraph:
    """Keras' own optimizers."""

    name: str = "tf2-keras"
    title: str = "Keras 3's Adafactor, LAMB, Adam and AdamW in tf.train.Checkpoint"
    containers: tuple[str, ...] = ("tf-bundle",)
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: dict.fromkeys(("adafactor", "lamb", "adamw"), (VARIANT,))
    )

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for an optimizer's lists in the object graph."""
        found = found_optimizer(checkpoint.tree, checkpoint.path)
        if found is None or _is_own(found):
            return None
        return Evidence(30, f"an object with {VARIABLES}, {TRAINED} and {ITERATIONS}: {found.name}")

    def decode(self, checkpoint: Checkpoint, hints: Hints) -> TrainState:
        """Returns the canonical state.

        Raises:
            StateError: Nothing tells which optimizer it is, or shapes and names contradict each other.
            UsageError: A hint that the schema doesn't know.
        """
        tree, found = checkpoint.tree, found_optimizer(checkpoint.tree, checkpoint.path)
        named = _named(found) if found else None
        if found is None or named is None:
            raise StateError(
                "The checkpoint doesn't say which optimizer of Keras it is about.",
                place=checkpoint.path,
                expected=", ".join(SCHEMAS),
                found=found.name if found else "none",
            )
        slots = numbered(named.schema, tensors_of(tree, found.own, checkpoint.path), vars(found.kept()))
        params = dict(zip((name for _, name in found.moved), tensors_of(tree, found.moved, ""), strict=True))
        _check(params, slots.shapes, found, checkpoint.path)
        frozen = frozen_keys(tree, found)
        order = [*params]
        owners = [
            (None if i is None else order[i], what)
            for i, what, _ in places(named.schema, slots.shapes, slots.kept)
        ]
        placed = {name: key for key, name in found.moved} | frozen
        home = graph_home(tree, found, placed, owners, self.name)
        parts = Parts(named, slots, params, {name: tree[key] for name, key in frozen.items()}, (), home)
        return state_of(parts, HOME, manifest_state(checkpoint, named.schema), hints)

    def encode(self, state: TrainState) -> Encoded:
        """Returns the flat tree of keys.

        Raises:
            InexactError: No optimizer of Keras holds the state; lists every reason.
        """
        home = home_in(state)
        kept, rows = variables_of(state, home, self.name)
        kind, schema = kind_of(state, home), state.optimizer.schema
        order = order_of(state)
        silent = kept.rate and rate_of(state) is None
        name = usual_name(kind)
        own = [
            Row(None if i is None else order[i], what, _full_name(name, order, i, what, schema), tensor)
            for i, what, tensor in rows
        ]
        return encoded_graph(state, home, name, LISTS[schema], own, silent, self.name)


def _named(found: Found) -> Named | None:
    named = by_name(found.name)
    if found.has("_r") and found.has("_c"):
        return Named("Adafactor")
    if named is None or named.kind == "Adafactor" or not found.has("_momentums"):
        return None
    return named


def _check(
    params: Mapping[str, Tensor], shapes: Sequence[tuple[int, ...]], found: Found, place: object
) -> None:
    """Checks that slots are those of the parameters, by their shapes, and by their names where these say it."""
    faults = [
        (f"has shape {tensor.shape}, its slots {shape}", path)
        for (path, tensor), shape in zip(params.items(), shapes, strict=False)
        if tensor.shape != shape
    ]
    if len(params) != len(shapes) or len(params) != len(found.moved):
        faults.append((f"there are slots of {len(shapes)}", f"{len(found.moved)} parameters"))
    ends = ("_momentum", "_velocity")
    flat = {path.replace("/", "_") for path in params}
    said = [name.removeprefix(f"{found.name}/") for _, name in found.own if name.endswith(ends)]
    faults += [
        ("is the slot of no parameter", name)
        for name in said
        if name.removesuffix(ends[0]).removesuffix(ends[1]) not in flat
    ]
    if faults:
        raise StateError(
            f"The slots don't fit the parameters: {len(faults)} faults.",
            place=place,
            found=fault_list(faults[:_SHOWN]),
        )


def _full_name(name: str, order: Sequence[str], i: int | None, what: str, schema: str) -> str:
    """Returns what Keras calls a variable of an optimizer."""
    if i is None:
        return f"{name}/{what}"
    if what in ("v_row", "v_col"):
        return f"{name}/{order[i].rpartition('/')[2]}"
    alias = "velocity" if schema == "adafactor" and what == "v" else _alias(schema, what)
    return f"{name}/{order[i].replace('/', '_')}_{alias}"


def _alias(schema: str, slot: str) -> str:
    slots = load_schema(schema).slots
    return slots[slot].aliases[VARIANT] if slot in slots else slot


@dataclass(frozen=True)
class StatekitGraph:
    """The optimizers of statekit.tensorflow."""

    name: str = "tf2-statekit"
    title: str = "a run with an optimizer of statekit.tensorflow in tf.train.Checkpoint"
    containers: tuple[str, ...] = ("tf-bundle",)
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {schema: stepped_variants(schema) for schema in CLASSES}
    )

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for an optimizer whose slots are named by paths."""
        found = found_optimizer(checkpoint.tree, checkpoint.path)
        if found is None or not _is_own(found):
            return None
        return Evidence(30, f"an object with {VARIABLES}, named as {found.own[-1][1]}")

    def decode(self, checkpoint: Checkpoint, hints: Hints) -> TrainState:
        """Returns the canonical state; hints are canonical.

        Raises:
            StateError: Nothing tells which optimizer it is, or names don't fit; lists every fault.
            UsageError: A hint that the schema doesn't know.
        """
        tree, found = checkpoint.tree, found_optimizer(checkpoint.tree, checkpoint.path)
        if found is None:
            raise StateError("The checkpoint holds no optimizer of Keras.", place=checkpoint.path)
        params = dict(zip((name for _, name in found.moved), tensors_of(tree, found.moved, ""), strict=True))
        named = named_slots(_by_name(tree, found))
        own = own_by_name(found.name, named)
        if own is None or len(params) != len(paths_of(named)) or len(params) != len(found.moved):
            raise StateError(
                "The checkpoint doesn't say which optimizer of statekit.tensorflow it is about.",
                place=checkpoint.path,
                expected=f"{', '.join(CLASSES.values())}, with slots of {len(params)} parameters",
                found=f"{found.name}, slots of {len(paths_of(named))}",
            )
        moved = params
        if {*params} != {*paths_of(named)}:
            moved = dict(zip(paths_of(named), params.values(), strict=True))
        frozen = frozen_keys(tree, found)
        owners = [_owner(key) for key in _by_name(tree, found)]
        placed = dict(zip(moved, (key for key, _ in found.moved), strict=True)) | frozen
        home = graph_home(tree, found, placed, owners, self.name)
        others = {name: tree[key] for name, key in frozen.items()}
        known = manifest_state(checkpoint, own.schema)
        return own_state(own, named, moved, others, {HOME: home}, known, hints)

    def encode(self, state: TrainState) -> Encoded:
        """Returns the flat tree of keys.

        Raises:
            InexactError: No optimizer of statekit.tensorflow goes on with the state.
        """
        home = home_in(state)
        held = own_variables(state, home)
        silent = RATE not in held and not home.get("schedule")
        name = Own(CLASSES[state.optimizer.schema]).usual_name
        before = [(ITERATION, held.pop(ITERATION))]
        if silent or RATE in held:
            before.append((RATE, held.pop(RATE, before[0][1])))
        first = [key for what in (AVERAGE, ACCUMULATOR) for key in held if key.endswith(f"{SEPARATOR}{what}")]
        rows = [Row(None, key, f"{name}/{key}", tensor) for key, tensor in before]
        for key in [*first, *(key for key in held if key not in first)]:
            owner, what = _owner(key)
            flat = f"{str(owner).replace('/', '_')}_{what}" if key in first else f"{owner}/{what}"
            rows.append(Row(owner, what, f"{name}/{flat}", held[key]))
        return encoded_graph(state, home, name, {}, rows, silent, self.name)


def _owner(key: str) -> tuple[str | None, str]:
    """Returns the path that a variable of statekit.tensorflow belongs to, and what it is."""
    owner, _, what = key.replace(SEPARATOR, "/").rpartition("/")
    return owner or None, what


def _is_own(found: Found) -> bool:
    """Tells whether slots are named as statekit.tensorflow does: `<optimizer>/<path>/<slot>`."""
    names = {name for _, name in found.moved}
    slots = (name.removeprefix(f"{found.name}/").rpartition("/")[0] for _, name in found.own)
    return not found.has("_momentums") and not found.has("_r") and bool({*slots} - {""}) and bool(names)


def _by_name(tree: Mapping[str, Any], found: Found) -> dict[str, Tensor]:
    """Returns the optimizer's variables by the names that they have in Keras' files."""
    tensors = tensors_of(tree, found.own, found.name)
    by_key = dict(zip((key for key, _ in found.own), tensors, strict=True))
    listed = {}
    for what, attribute in BASE_LISTS.items():
        node = found.graph.child(found.node, attribute)
        values = values_of(found.graph, node) if node is not None else ()
        for (key, _), (_, path) in zip(values, found.moved, strict=False):
            listed[key] = f"{path}/{what}"
    names = {key: listed.get(key, name.removeprefix(f"{found.name}/")) for key, name in found.own}
    return {names[key].replace("/", SEPARATOR): tensor for key, tensor in by_key.items()}


KERAS = KerasGraph()
STATEKIT = StatekitGraph()
