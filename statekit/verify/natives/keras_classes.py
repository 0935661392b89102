"""Keras' optimizers, which load variables by their own `load_own_variables`, and statekit's own of Keras."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

import statekit.tensorflow
from statekit.errors import UsageError
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensorflow.live import live_state
from statekit.tensors.tensor import Array
from statekit.verify.natives import Native, Rates, Updates, one_rate, written


def runner(name: str, variant: str) -> Native:
    """Returns what makes updates with a class; `statekit.tensorflow` is that of a state's optimizer."""
    if name == "statekit.tensorflow":
        return _drop_in(name, variant)
    constructor = getattr(keras.optimizers, name.rpartition(".")[2])

    def run(state: TrainState, updates: Updates, rates: Rates) -> TrainState:
        if len(state.optimizer.groups) != 1:
            raise UsageError(f"{name} has one group.", found=len(state.optimizer.groups))
        (group,) = state.optimizer.groups
        arguments = load_schema(state.optimizer.schema).native("keras", group.hyperparameters)
        parameters = inspect.signature(constructor).parameters
        taken = {n: v for n, v in arguments.items() if n in parameters}
        if rates[0] is not None:
            taken["learning_rate"] = rates[0]
        optimizer = constructor(**taken)
        excluded = arguments.get("exclude_from_weight_decay")
        variables = {path: keras.Variable(param.read()) for path, param in state.params.items()}
        if excluded:
            raise UsageError(
                f"{name} takes parameters without decay by a call, not by an argument.", found=excluded
            )
        optimizer.build([*variables.values()])
        with (
            tempfile.TemporaryDirectory() as folder,
            h5py.File(written(state, "keras-h5", "keras", Path(folder))) as file,
        ):
            stored = {key: np.asarray(value) for key, value in file["optimizer"]["vars"].items()}
        optimizer.load_own_variables(stored)
        if rates[0] is not None:
            optimizer.learning_rate.assign(rates[0])
        return _moved(optimizer, variables, updates)

    return run


def _drop_in(name: str, variant: str) -> Native:
    """Returns what makes updates with statekit's class of a state: it is traced once, and put back for each run."""
    kept: list[tuple[Any, dict[str, Any], list[Array]]] = []

    def run(state: TrainState, updates: Updates, rates: Rates) -> TrainState:
        if any("average" in slots for slots in state.slots.values()):
            raise UsageError("Keras' own base class keeps averages.", found="average")
        if not kept:
            optimizer, variables = _loaded(state, one_rate(name, rates), variant)
            kept.append(
                (optimizer, variables, [np.array(keras.ops.convert_to_numpy(v)) for v in optimizer.variables])
            )
        optimizer, variables, begun = kept[0]
        for path, variable in variables.items():
            variable.assign(state.params[path].read())
        for variable, value in zip(optimizer.variables, begun, strict=True):
            variable.assign(value)
        return _moved(optimizer, variables, updates)

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


def _moved(optimizer: Any, variables: Mapping[str, Any], updates: Updates) -> TrainState:
    """Returns the state after updates."""
    for grads in updates:
        present = [path for path in variables if path in grads]
        values = [keras.ops.convert_to_tensor(grads[path]) for path in present]
        optimizer.apply(values, [variables[path] for path in present])
    return live_state(variables, optimizer)
