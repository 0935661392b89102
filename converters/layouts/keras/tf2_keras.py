"""Layout `tf2-keras`: optimizers of Keras 3 in `tf.train.Checkpoint`.

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

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.hyperparameters import manifest_state
from statekit.converters.layouts.keras import muon, native
from statekit.converters.layouts.keras.graph_optimizer import (
    ITERATIONS,
    TRAINED,
    VARIABLES,
    GraphOptimizer,
    Row,
    encoded_graph,
    found_optimizer,
    frozen_keys,
    graph_home,
    tensors_of,
)
from statekit.converters.layouts.keras.home import home_in
from statekit.converters.layouts.keras.like import laid_out_like
from statekit.converters.layouts.keras.lines import object_lines
from statekit.converters.layouts.keras.state import (
    HOME,
    SCHEMAS,
    VARIANT,
    Named,
    Parts,
    by_name,
    kind_of,
    numbered,
    order_of,
    places,
    rate_of,
    state_of,
    usual_name,
    variables_of,
)
from statekit.errors import Faults, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor

_MOMENTS = {"m": "_momentums", "v": "_velocities", "v_max": "_velocity_hats"}
LISTS = {"adafactor": {"v_row": "_r", "v_col": "_c", "v": "_v"}, "adamw": _MOMENTS, "lamb": _MOMENTS}


@dataclass(frozen=True)
class KerasGraph:
    """Keras' own optimizers."""

    name: str = "tf2-keras"
    title: str = "Keras 3's Adafactor, LAMB, Adam and AdamW in tf.train.Checkpoint"
    containers: tuple[str, ...] = ("tf-bundle",)
    schedule_in: str = "iterations"
    stores_values: bool = True
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            **dict.fromkeys(("adafactor", "lamb", "adamw", "muon"), (VARIANT,)),
            native.SCHEMA: (),
        }
    )
    holds_several: bool = True

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for an optimizer's lists in the object graph."""
        optimizer = found_optimizer(checkpoint)
        if optimizer is None or optimizer.by_path:
            return None
        return Evidence(30, f"an object with {VARIABLES}, {TRAINED} and {ITERATIONS}: {optimizer.name}")

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        tree, optimizer = checkpoint.tree, found_optimizer(checkpoint)
        named = _named(optimizer) if optimizer else None
        if optimizer is not None and named is None:
            return self._native_state(checkpoint, optimizer, hints)
        if optimizer is None or named is None:
            raise StateError(
                "The checkpoint doesn't say which optimizer of Keras it is about.",
                place=checkpoint.path,
                expected=", ".join(SCHEMAS),
                found=optimizer.name if optimizer else "none",
            )
        slots = numbered(
            named.schema, tensors_of(tree, optimizer.variables, checkpoint.path), vars(optimizer.kept())
        )
        params = dict(
            zip((name for _, name in optimizer.moved), tensors_of(tree, optimizer.moved, ""), strict=True)
        )
        order = [*params]
        rows = places(named.schema, slots.shapes, slots.kept)
        owners = [(None if i is None or i >= len(order) else order[i], slot) for i, slot, _ in rows]
        _check(params, slots.shapes, optimizer, owners, checkpoint.path)
        frozen = frozen_keys(tree, optimizer)
        placed = {name: key for key, name in optimizer.moved} | frozen
        home = graph_home(tree, optimizer, placed, owners, self.name)
        parts = Parts(named, slots, params, {name: tree[key] for name, key in frozen.items()}, (), home)
        return state_of(parts, HOME, manifest_state(checkpoint, named.schema), hints)

    def like(self, state: TrainState, model: Checkpoint) -> TrainState:
        return laid_out_like(state, model)

    def encode(self, state: TrainState) -> Encoded:
        home = home_in(state)
        if muon.is_of_its_class(state):
            state = muon.together(state, home)
            return self._encode_native(state, home_in(state))
        if state.optimizer.schema == native.SCHEMA:
            return self._encode_native(state, home)
        kept, rows = variables_of(state, home, self.name)
        kind, schema = kind_of(state, home), state.optimizer.schema
        order = order_of(state)
        silent = kept.rate and rate_of(state) is None
        name = usual_name(kind)
        variables = [
            Row(None if i is None else order[i], slot, _full_name(name, order, i, slot, schema), tensor)
            for i, slot, tensor in rows
        ]
        return encoded_graph(state, home, name, LISTS[schema], variables, silent, self.name)

    def _native_state(
        self, checkpoint: Checkpoint, optimizer: GraphOptimizer, hints: CheckpointRef
    ) -> TrainState:
        """Returns the state of an optimizer without a schema, by the names of its variables."""
        tree = checkpoint.tree
        _check_names(optimizer, checkpoint.path)
        moved = dict(
            zip((name for _, name in optimizer.moved), tensors_of(tree, optimizer.moved, ""), strict=True)
        )
        values = tensors_of(tree, optimizer.variables, checkpoint.path)
        names = [name.removeprefix(f"{optimizer.name}/") for _, name in optimizer.variables]
        owners = [native.owner_of(name, [*moved]) for name in names]
        frozen = frozen_keys(tree, optimizer)
        placed = {name: key for key, name in optimizer.moved} | frozen
        signature = native.signature_in(None, optimizer.name, None, hints.optimizer)
        return muon.class_state(
            signature or native.signature_of(optimizer.name),
            [(path, slot, tensor) for (path, slot), tensor in zip(owners, values, strict=True)],
            (moved, {name: tree[key] for name, key in frozen.items()}),
            graph_home(tree, optimizer, placed, owners, self.name),
            checkpoint,
            hints,
        )

    def _encode_native(self, state: TrainState, home: Mapping[str, Any]) -> Encoded:
        """Returns the flat tree of keys for an optimizer without a schema."""
        kind = str(state.optimizer.variant)
        name = native.usual_name(kind)
        rows = [
            Row(path, slot, f"{name}/{slot if path is None else path.replace('/', '_') + '_' + slot}", tensor)
            for path, slot, tensor in native.native_rows(state, home, self.name)
        ]
        lists = native.signature_of(kind).lists or {}
        return encoded_graph(state, home, name, lists, rows, False, self.name)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return object_lines(state, saved)


def _named(optimizer: GraphOptimizer) -> Named | None:
    named = by_name(optimizer.name)
    if optimizer.has("_r") and optimizer.has("_c"):
        return Named("Adafactor")
    if named is None or named.kind == "Adafactor" or not optimizer.has("_momentums"):
        return None
    return named


def _check(
    params: Mapping[str, Tensor],
    shapes: Sequence[tuple[int, ...]],
    optimizer: GraphOptimizer,
    owners: Sequence[tuple[str | None, str]],
    place: object,
) -> None:
    """Checks that slots are those of the parameters, by their shapes, and by their names where these say it."""
    faults = Faults(
        (f"has shape {tensor.shape}, its slots {shape}", path)
        for (path, tensor), shape in zip(params.items(), shapes, strict=False)
        if tensor.shape != shape
    )
    if len(params) != len(shapes) or len(params) != len(optimizer.moved):
        faults.add(f"there are slots of {len(shapes)}", f"{len(optimizer.moved)} parameters")
    # TensorFlow numbers the scopes of an optimizer inside a loss scale: adam_w_1/dense_kernel_velocity.
    for (_, name), (path, _) in zip(optimizer.variables, owners, strict=False):
        named = _SLOT_OF.fullmatch(name.rpartition("/")[2])
        if named and named[1] != (path or "").replace("/", "_"):
            faults.add(f"stands where a slot of {path} belongs", name)
    faults.check(StateError, "The slots don't fit the parameters", place=place)


def _check_names(optimizer: GraphOptimizer, place: object) -> None:
    """Checks that each variable of an optimizer has a name of its own, which no parameter has."""
    counts = Counter(name for _, name in (*optimizer.variables, *optimizer.moved))
    faults = Faults(("is the name of several variables", name) for name, count in counts.items() if count > 1)
    scope = re.compile(rf"{re.escape(optimizer.name)}(_\d+)?/", re.DOTALL)
    faults += [
        ("isn't named as a variable of the optimizer", name)
        for _, name in optimizer.variables
        if not scope.match(name)
    ]
    faults += [
        ("is named as a variable of the optimizer", name) for _, name in optimizer.moved if scope.match(name)
    ]
    faults.check(StateError, "The optimizer's variables can't be told by their names", place=place)


_SLOT_OF = re.compile(r"(.+)_(?:momentum|velocity)", re.DOTALL)
"""What Keras 3 calls a slot by: its parameter's path, with _ for /."""


def _full_name(name: str, order: Sequence[str], i: int | None, slot: str, schema: str) -> str:
    """Returns what Keras calls a variable of an optimizer."""
    if i is None:
        return f"{name}/{slot}"
    if slot in ("v_row", "v_col"):
        return f"{name}/{order[i].rpartition('/')[2]}"
    alias = "velocity" if schema == "adafactor" and slot == "v" else _alias(schema, slot)
    return f"{name}/{order[i].replace('/', '_')}_{alias}"


def _alias(schema: str, slot: str) -> str:
    slots = load_schema(schema).slots
    return slots[slot].aliases[VARIANT] if slot in slots else slot


LAYOUT = KerasGraph()
