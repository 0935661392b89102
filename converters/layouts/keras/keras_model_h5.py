"""The layout `keras-model-h5`: a whole model in one `.h5` file, as `model.save("model.h5")` of Keras 2 and 3 writes it.

    model_weights/<layer>/<weight>     optimizer_weights/<variable>     @model_config, @training_config

The file lists all names in order, and both configs, so that nothing is left to ask. `listed` finds them.

    Keras 3           iteration, learning_rate, m and v of each parameter ...    adam/sequential_dense_kernel_momentum
    Keras 2           iteration, m and v of each parameter ...                   Adam/m/hidden/kernel:0
    Keras 2, legacy   iter, m of all parameters, v of all ...                    Adam/hidden/kernel/m:0

A state goes back into the file that it came from; one from elsewhere has no names of TensorFlow's variables.

Source: keras-team/keras, keras/src/legacy/saving/legacy_h5_format.py, `save_model_to_hdf5`;
keras-team/keras v2.15.0, keras/saving/legacy/hdf5_format.py; keras/optimizers/legacy/optimizer_v2.py, `weights`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.hyperparameters import manifest_state
from statekit.converters.layouts.keras import muon, native
from statekit.converters.layouts.keras.home import home_in, is_keras2
from statekit.converters.layouts.keras.layout import (
    arguments,
    file_tree,
    frozen_of,
    given_order,
    left_out,
    merged,
    put,
)
from statekit.converters.layouts.keras.lines import model_file_lines
from statekit.converters.layouts.keras.listed import is_listed, listed_config, listed_rows, listed_variables
from statekit.converters.layouts.keras.named_rows import check_rows, config_signature, named_row
from statekit.converters.layouts.keras.slot_names import owners as owners_of
from statekit.converters.layouts.keras.state import (
    HOME,
    ITERATION,
    VARIANT,
    Named,
    Numbered,
    Parts,
    by_config,
    kind_of,
    numbered,
    places,
    state_of,
    unknown_class,
)
from statekit.converters.layouts.keras.variables import Order, Place, Variable, in_order, is_group, without
from statekit.errors import InexactError
from statekit.files.checkpoint import ATTRIBUTES, Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor

WHOLE = "whole_h5"
"""Key in the home of Keras' layouts: what a whole-model file holds besides, and where everything lies in it."""
_LEGACY_ITERATION = ("iter", "iter:0")
TRAINING = "training_config"


@dataclass(frozen=True)
class KerasModelH5:
    """Keras' own optimizers, in whole-model files."""

    name: str = "keras-model-h5"
    title: str = "Keras 2's and 3's optimizers in a whole-model .h5"
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            **dict.fromkeys(("adafactor", "lamb", "adamw", "muon"), (VARIANT,)),
            native.SCHEMA: (),
        }
    )
    holds_several: bool = True
    containers: tuple[str, ...] = ("keras-h5",)
    schedule_in: str = "iterations"
    stores_values: bool = True
    only_goes_back: bool = True

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for listed weights of a model and of an optimizer."""
        tree = checkpoint.tree
        if checkpoint.container not in self.containers or not is_group(tree) or not is_listed(tree):
            return None
        rows = listed_rows(tree)
        return Evidence(20, f"optimizer_weights lists {len(rows)} variables") if rows else None

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        tree = file_tree(checkpoint)
        named = by_config(listed_config(tree), is_keras2(tree))
        every = listed_variables(tree)
        if named is None:
            return _native_state(checkpoint, tree, every, hints)
        rows = _in_keras_order(_inner_rows(listed_rows(tree)), named)
        trained = [variable.tensor for variable in every if variable.trained]
        slots = numbered(named.schema, [tensor for _, _, tensor in rows], named.known_kept(hints), trained)
        order = _order(every, rows, slots, named.schema, hints.param_names)
        frozen = frozen_of(tree, every, order)
        moved = [*order.moved]
        owners = [
            (None if i is None else moved[i], name)
            for i, name, _ in places(named.schema, slots.shapes, slots.kept)
        ]
        parts = Parts(
            named,
            slots,
            {path: variable.tensor for path, variable in order.moved.items()},
            {path: variable.tensor for path, variable in frozen.items()},
            order.notes,
            {WHOLE: _home(tree, order, frozen, [place for place, _, _ in rows], owners)},
        )
        return state_of(parts, HOME, manifest_state(checkpoint, named.schema), hints)

    def encode(self, state: TrainState) -> Encoded:
        """Returns the file's tree: the one that the state came from, with its values."""
        home = home_in(state)
        whole = home.get(WHOLE)
        if not isinstance(whole, Mapping):
            raise InexactError(
                "A whole-model .h5 file has the model's config and names, which this state does not have.",
                place=f"layout {self.name}",
                expected="a state of such a file",
                found="one from elsewhere",
                remedy="write a .weights.h5 (--layout keras), and load it into the model",
            )
        if muon.is_of_its_class(state):
            state = muon.together(state, home)
        if state.optimizer.schema == native.SCHEMA:
            home = home_in(state)
        values = native.values_of_slots(state, home, self.name)
        had = {(path, slot): tuple(place) for path, slot, place in whole["rows"]}
        if values.keys() != had.keys() or state.params.keys() != whole["places"].keys():
            raise InexactError(
                "The state has other parameters or slots than the file that it came from.",
                place=f"layout {self.name}",
                expected=f"{len(had)} variables of the optimizer and {len(whole['places'])} of the model",
                found=f"{len(values)} and {len(state.params)}",
                remedy="write a .weights.h5 (--layout keras), and load it into the model",
            )
        tree: dict[str, Any] = {}
        for path, tensor in state.params.items():
            put(tree, whole["places"][path], tensor, ())
        for key, place in had.items():
            put(tree, place, values[key], ())
        tree = merged(_with_arguments(whole["tree"], state, home), tree)
        return Encoded(tree, state.counts.updates, dropped=left_out(state, WHOLE, "keras2"))

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return model_file_lines(state, saved)


def _native_state(
    checkpoint: Checkpoint, tree: Mapping[str, Any], every: Sequence[Variable], hints: CheckpointRef
) -> TrainState:
    """Returns the state of an optimizer without a schema, whose variables are told apart by their names.

    Raises:
        StateError: The file names no optimizer, or its names don't tell the variables apart.
    """
    config = listed_config(tree)
    signature = config_signature(config, is_keras2(tree))
    if signature is None:
        raise unknown_class(config, "no optimizer_config", checkpoint.path)
    by_name = {variable.name: variable for variable in every}
    stored = _inner_rows(listed_rows(tree))
    rows = [named_row("/".join(place), name, [*by_name]) for place, name, _ in stored]
    check_rows(rows, checkpoint.path)
    owned = [*dict.fromkeys(row.path for row in rows if row.path is not None)]
    order = Order({name: by_name[name] for name in owned or [v.name for v in every if v.trained]})
    frozen = frozen_of(tree, every, order)
    owners = [(row.path, row.slot) for row in rows]
    return muon.class_state(
        signature,
        [(row.path, row.slot, tensor) for row, (_, _, tensor) in zip(rows, stored, strict=True)],
        (
            {path: variable.tensor for path, variable in order.moved.items()},
            {path: variable.tensor for path, variable in frozen.items()},
        ),
        {WHOLE: _home(tree, order, frozen, [place for place, _, _ in stored], owners)},
        checkpoint,
        hints,
    )


def _inner_rows(rows: Sequence[tuple[Place, str, Tensor]]) -> list[tuple[Place, str, Tensor]]:
    """Returns an optimizer's variables without those of a loss scale of Keras 3 around it, which stand before them.

    Source: keras-team/keras, keras/src/optimizers/loss_scale_optimizer.py, `LossScaleOptimizer.variables`.
    """
    first = [i for i, (_, name, _) in enumerate(rows) if name.rpartition("/")[2] == ITERATION]
    return [*rows[first[-1] if len(first) > 1 else 0 :]]


def _in_keras_order(
    rows: Sequence[tuple[Place, str, Tensor]], named: Named
) -> list[tuple[Place, str, Tensor]]:
    """Returns an optimizer's variables in the order of Keras 3: of legacy optimizers, each slot stands in a row.

    Source: keras-team/keras v2.15.0, keras/optimizers/legacy/adam.py, `_create_slots`.
    """
    first, *slots = rows
    if first[1].rpartition("/")[2] not in _LEGACY_ITERATION:
        return [*rows]
    kinds = 3 if (named.config or {}).get("amsgrad") else 2
    count = len(slots) // kinds
    pairs = [slot for i in range(count) for slot in (slots[i], slots[i + count])]
    return [first, *pairs, *slots[2 * count :]]


def _order(
    every: Sequence[Variable],
    rows: Sequence[tuple[Place, str, Tensor]],
    slots: Numbered,
    schema: str,
    given: Sequence[str] | None,
) -> Order:
    """Returns the variables that the optimizer moves: by the names of its own, or else by the model's order."""
    if given is not None:
        return given_order(every, given, slots.shapes, True)
    slot_names = [name for _, name, _ in places(schema, slots.shapes, slots.kept)]
    second = [(row[1], row[2].shape) for row, slot in zip(rows, slot_names, strict=True) if slot == "v"]
    names = owners_of(second, {variable.name: variable.tensor.shape for variable in every})
    if names is None:
        return in_order(every, slots.shapes, True)
    by_name = {variable.name: variable for variable in every}
    return Order({name: by_name[name] for name in names})


def _home(
    tree: Mapping[str, Any],
    order: Order,
    frozen: Mapping[str, Variable],
    row_places: Sequence[Place],
    owners: Sequence[tuple[str | None, str]],
) -> dict[str, Any]:
    """Returns what the file holds besides parameters and slots, and where those lie."""
    placed = {path: variable.place for path, variable in {**order.moved, **frozen}.items()}
    return {
        "tree": without(tree, [*placed.values(), *row_places]),
        "places": {path: list(place) for path, place in placed.items()},
        "rows": [[path, slot, list(place)] for (path, slot), place in zip(owners, row_places, strict=True)],
    }


def _with_arguments(tree: Mapping[str, Any], state: TrainState, home: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a file's tree whose training_config has the state's hyperparameters."""
    config = listed_config(tree) or {}
    before = by_config(config, is_keras2(tree))
    if before is None or before.config is None:
        return tree
    now = arguments(state, before, kind_of(state, home))
    if now == before.config:
        return tree
    training = json.loads(tree[ATTRIBUTES][TRAINING])
    record = training["optimizer_config"]
    holder = record["config"].get("inner_optimizer", record)
    holder["config"] = now
    return {**tree, ATTRIBUTES: {**tree[ATTRIBUTES], TRAINING: json.dumps(training)}}


LAYOUT = KerasModelH5()
