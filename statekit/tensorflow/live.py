"""A live run in Keras as a checkpoint in memory, so that layouts decode it as they decode files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras

from statekit.arrays.backend import backend
from statekit.conversion import registry
from statekit.conversion.contracts import NO_HINTS
from statekit.dropin.matching import renamed
from statekit.errors import UsageError
from statekit.files.checkpoint import ATTRIBUTES, Checkpoint
from statekit.state.options import FACTOR, RATE_NAMES
from statekit.state.train_state import Group, Optimizer, TrainState
from statekit.tensorflow.naming import path_of
from statekit.tensorflow.optimizer import SchemaOptimizer
from statekit.tensors.tensor import DTYPES, Array, DType, Index, Shape, index_shape, normal_index

LIVE = Path("the live run")


@dataclass(frozen=True)
class LiveVariable:
    """A variable in memory, on whatever device."""

    value: Any
    name: str

    @property
    def shape(self) -> Shape:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> DType:
        return DTYPES[getattr(self.value.dtype, "name", self.value.dtype)]

    @property
    def grain(self) -> Shape:
        return self.shape

    def read(self, index: Index | None = None) -> Array:
        """Reads a block; no more of it is copied."""
        bounds = normal_index(index, self.shape)
        value = self.value.value if isinstance(self.value, keras.Variable) else self.value
        block = backend("tensorflow").numpy(value[bounds] if bounds else value)
        return block.reshape(index_shape(bounds))

    def to_json(self) -> dict[str, Any]:
        return {"op": "live", "name": self.name, "shape": list(self.shape), "dtype": self.dtype.name}


def live_checkpoint(variables: Mapping[str, Any], optimizer: Any) -> Checkpoint:
    """Returns what is live in the form in which a file of Keras is read; arguments are those of `live_state`."""
    return _checkpoint(variables, optimizer, _built(variables, optimizer))


def _checkpoint(variables: Mapping[str, Any], optimizer: Any, built: Any) -> Checkpoint:
    moved, name_of = built._trainable_variables, _names(variables, built)
    ids = {id(variable) for variable in moved}
    rest = [variable for variable in variables.values() if id(variable) not in ids]
    ordered = [variable for variable in [*moved, *rest] if id(variable) in name_of]
    places = [(str(i), "vars", "0") for i in range(len(ordered))]
    named = [
        [list(place), name_of[id(variable)], id(variable) in ids]
        for place, variable in zip(places, ordered, strict=True)
    ]
    config = keras.saving.serialize_keras_object(optimizer)
    attributes = {
        "config.json": {"compile_config": {"optimizer": config}},
        "statekit_keras": {"variables": named},
    }
    tree = {
        ATTRIBUTES: attributes,
        **{
            str(i): {"vars": {"0": LiveVariable(variable, name_of[id(variable)])}}
            for i, variable in enumerate(ordered)
        },
        "optimizer": {
            "vars": {key: LiveVariable(variable, key) for key, variable in _kept(optimizer, built).items()}
        },
    }
    return Checkpoint("keras", LIVE, tree)


def live_state(variables: Mapping[str, Any], optimizer: Any) -> TrainState:
    """Returns the canonical state of what is live.

    An optimizer that hasn't been built has no slots, and moves every variable that can be trained.

    Args:
        variables: The model's variables by name, those that aren't trained too.
        optimizer: What makes the updates: Keras' own, or statekit's.

    Raises:
        StateError: The state breaks its layout's rules; or no layout knows the optimizer.
    """
    built = _built(variables, optimizer)
    checkpoint = _checkpoint(variables, optimizer, built)
    layout, _ = registry.detect_layout(checkpoint)
    state = registry.decoded(layout, checkpoint, NO_HINTS)
    name_of = _names(variables, built)
    arrays = {
        name: name_of[id(variable)] for name, variable in variables.items() if name_of[id(variable)] != name
    }
    state = renamed(state, arrays, LIVE)
    if isinstance(optimizer.get_config()["learning_rate"], Mapping):
        state = _with_rate(state, optimizer)
    return state if optimizer.built else _without_slots(state)


def _built(variables: Mapping[str, Any], optimizer: Any) -> Any:
    return optimizer if optimizer.built else _begun(optimizer, [v for v in variables.values() if v.trainable])


def _names(variables: Mapping[str, Any], built: Any) -> dict[int, str]:
    """Returns the name of each variable by its `id`: that which an optimizer of statekit has for it, or the given."""
    names, moved = canonical_names(built), built._trainable_variables
    given = {id(variable): name for name, variable in variables.items()}
    return given | {
        id(variable): names[path_of(variable)] for variable in moved if path_of(variable) in names
    }


def canonical_names(optimizer: Any) -> dict[str, str]:
    """Returns what an optimizer of statekit calls its variables after their checkpoint, where that is another name."""
    named = optimizer._paths.by_name if isinstance(optimizer, SchemaOptimizer) else {}
    return {path: name for path, name in named.items() if path != name}


def _kept(optimizer: Any, built: Any) -> dict[str, Any]:
    """Returns an optimizer's variables as it names or numbers them in files."""
    if isinstance(built, SchemaOptimizer):
        return {**built._by_name(), **optimizer._by_name()}
    rows = list(optimizer.variables)
    return {
        str(i): variable
        for i, variable in enumerate(rows if built is optimizer else [*rows, *built.variables[2:]])
    }


def _begun(optimizer: Any, variables: Sequence[Any]) -> Any:
    """Returns a built copy of an optimizer that isn't built yet, with a constant rate, which is its second variable."""
    try:
        begun = type(optimizer).from_config({**optimizer.get_config(), "learning_rate": 0.0})
        begun.build(variables)
    except Exception as error:  # of a class of the user's
        raise UsageError(
            "An optimizer that isn't built yet can't be copied, to see which variables it will have.",
            place=type(optimizer).__name__,
            found=f"{type(error).__name__}: {error}",
            remedy="call optimizer.build(model.trainable_variables) first",
        ) from error
    return begun


def _with_rate(state: TrainState, optimizer: Any) -> TrainState:
    """Returns the state with the rate of the next update, which a schedule makes."""
    rate = float(backend("tensorflow").numpy(optimizer.learning_rate))

    def with_rate(i: int, group: Group) -> Group:
        name = next((n for n in RATE_NAMES if n in group.hyperparameters), RATE_NAMES[0])
        value = rate * rate_factor(optimizer, state.optimizer, i)
        return replace(group, hyperparameters={**group.hyperparameters, name: value})

    groups = tuple(with_rate(i, group) for i, group in enumerate(state.optimizer.groups))
    return replace(state, optimizer=replace(state.optimizer, groups=groups))


def rate_factor(optimizer: Any, decoded: Optimizer, group: int) -> float:
    """Returns what an optimizer multiplies its learning rate by in a group.

    Args:
        optimizer: The live one.
        decoded: The same, as its layout decodes it.
        group: The number of the group.
    """
    if isinstance(optimizer, keras.optimizers.Muon):
        is_adams = group < len(decoded.groups) and decoded.kind(decoded.groups[group])[0] != "muon"
        return float(optimizer.adam_lr_ratio) if is_adams else 1.0
    groups = optimizer.spec.groups if isinstance(optimizer, SchemaOptimizer) else ()
    return float(groups[group].get(FACTOR, 1.0)) if group < len(groups) else 1.0


def _without_slots(state: TrainState) -> TrainState:
    groups = tuple(replace(group, slots={}) for group in state.optimizer.groups)
    return replace(
        state, slots={path: {} for path in state.slots}, optimizer=replace(state.optimizer, groups=groups)
    )
