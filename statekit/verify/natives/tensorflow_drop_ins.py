"""statekit's own optimizers of Keras, as somebody loads them who goes on from a file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import statekit.tensorflow
from statekit.errors import UsageError
from statekit.state.train_state import TrainState
from statekit.tensorflow.live import live_state
from statekit.tensors.tensor import Array
from statekit.verify.natives import Native, Rates, Updates, one_rate, written


def runner(name: str, variant: str) -> Native:
    """Returns what makes updates with a state's class: it is traced once, and put back for each run."""
    kept: list[tuple[Any, dict[str, Any], list[Array]]] = []

    def run(state: TrainState, updates: Updates, rates: Rates) -> TrainState:
        if any("average" in slots for slots in state.slots.values()):
            raise UsageError("Keras' own base class keeps averages.", found="average")
        if not kept:
            optimizer, variables = _loaded(state, one_rate(name, rates), variant)
            kept.append((optimizer, variables, [_array(variable) for variable in optimizer.variables]))
        optimizer, variables, begun = kept[0]
        for path, variable in variables.items():
            variable.assign(state.params[path].read())
        for variable, value in zip(optimizer.variables, begun, strict=True):
            variable.assign(value)
        for grads in updates:
            present = [path for path in variables if path in grads]
            given = [keras.ops.convert_to_tensor(grads[path]) for path in present]
            optimizer.apply(given, [variables[path] for path in present])
        return live_state(variables, optimizer)

    return run


def _loaded(state: TrainState, rate: float, variant: str) -> tuple[Any, dict[str, Any]]:
    variables = {path: keras.Variable(param.read()) for path, param in state.params.items()}
    names = {variable.path: path for path, variable in variables.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = written(state, "keras-h5", "statekit-keras", Path(folder))
        optimizer = statekit.tensorflow.load_optimizer(
            path, list(variables.values()), rate, variant=variant, names=names
        )
    return optimizer, variables


def _array(value: object) -> Array:
    return np.array(keras.ops.convert_to_numpy(value))
