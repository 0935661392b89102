"""Keras' optimizers, which load the variables of a file that was just written by their own `load_own_variables`."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path

import h5py
import keras
import numpy as np

from statekit.errors import UsageError
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensorflow.live import live_state
from statekit.verify.natives import Native, Rates, Updates, written


def runner(name: str, variant: str) -> Native:
    """Returns what makes updates with a class."""
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
        for grads in updates:
            present = [path for path in variables if path in grads]
            given = [keras.ops.convert_to_tensor(grads[path]) for path in present]
            optimizer.apply(given, [variables[path] for path in present])
        return live_state(variables, optimizer)

    return run
