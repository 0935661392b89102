"""statekit's own optimizers of Keras, as somebody loads them who goes on from a file."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

import statekit.tensorflow
from statekit.errors import UsageError
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array, in_memory
from statekit.verify.natives import Native, Rates, Updates
from statekit.verify.natives.files import one_rate, written


def runner(name: str, variant: str) -> Native:
    """Returns what makes updates with a state's class: it is traced once, and put back for each run."""
    kept: list[tuple[Any, dict[str, Any], list[Array]]] = []

    def run(state: TrainState, updates: Updates, rates: Rates) -> TrainState:
        if any("average" in slots for slots in state.slots.values()):
            raise UsageError("Keras' own base class keeps averages.", found="average")
        if not kept:
            optimizer, variables = _loaded(state, one_rate(name, rates), variant)
            kept.append((optimizer, variables, [_array(one) for one in optimizer.variables]))
        optimizer, variables, begun = kept[0]
        for path, variable in variables.items():
            variable.assign(state.params[path].read())
        for variable, value in zip(optimizer.variables, begun, strict=True):
            variable.assign(value)
        names = {variable.path: path for path, variable in variables.items()}
        for grads in updates:
            present = [path for path in variables if path in grads]
            given = [keras.ops.convert_to_tensor(grads[path]) for path in present]
            optimizer.apply(given, [variables[path] for path in present])
        slots = {names.get(key, key): values for key, values in optimizer.slots().items()}
        groups = tuple(
            replace(
                group,
                slots={slot: in_memory(_array(slots[f"groups/{i}"][slot]), slot) for slot in group.slots},
            )
            for i, group in enumerate(state.optimizer.groups)
        )
        return replace(
            state,
            optimizer=replace(state.optimizer, groups=groups),
            params={path: in_memory(_array(one), path) for path, one in variables.items()},
            slots={
                path: {slot: in_memory(_array(slots[path][slot]), slot) for slot in there}
                for path, there in state.slots.items()
            },
        )

    return run


def _loaded(state: TrainState, rate: float, variant: str) -> tuple[Any, dict[str, Any]]:
    variables = {
        path: keras.Variable(param.read(), name=path.replace("/", "_"))
        for path, param in state.params.items()
    }
    names = {variable.path: path for path, variable in variables.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = written(state, "keras-h5", "statekit-keras", Path(folder))
        optimizer = statekit.tensorflow.load_optimizer(
            path, list(variables.values()), rate, variant=variant, names=names
        )
    return optimizer, variables


def _array(value: object) -> Array:
    return np.array(keras.ops.convert_to_numpy(value))
