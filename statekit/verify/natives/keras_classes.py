"""Keras' optimizers, which load the variables of a file that was just written by their own `load_own_variables`."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from statekit.errors import UsageError
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array, in_memory
from statekit.verify.natives import Native, Rates, Updates
from statekit.verify.natives.files import written
from statekit.verify.systems.native_slots import canonical_slots

SLOTS: Mapping[str, Mapping[str, str]] = {
    "adamw": {"m": "_momentums", "v": "_velocities", "v_max": "_velocity_hats"},
    "lamb": {"m": "_momentums", "v": "_velocities"},
    "adafactor": {"v_row": "_r", "v_col": "_c", "v": "_v"},
}
"""Where Keras' classes keep each slot. Source: keras-team/keras src/optimizers/{adam,lamb,adafactor}.py, `build`."""
_AVERAGE = "_model_variables_moving_average"


def runner(name: str, variant: str) -> Native:
    """Returns what makes updates with a class."""
    made = getattr(keras.optimizers, name.rpartition(".")[2])

    def run(state: TrainState, updates: Updates, rates: Rates) -> TrainState:
        if len(state.optimizer.groups) != 1:
            raise UsageError(f"{name} has one group.", found=len(state.optimizer.groups))
        (group,) = state.optimizer.groups
        arguments = load_schema(state.optimizer.schema).native("keras", group.hyperparameters)
        known = inspect.signature(made).parameters
        taken = {n: v for n, v in arguments.items() if n in known}
        if rates[0] is not None:
            taken["learning_rate"] = rates[0]
        optimizer = made(**taken)
        excluded = arguments.get("exclude_from_weight_decay")
        variables = [keras.Variable(param.read(), name=_name(path)) for path, param in state.params.items()]
        if excluded:
            raise UsageError(f"{name} is told by a call which parameters have no decay.", found=excluded)
        optimizer.build(variables)
        with (
            tempfile.TemporaryDirectory() as folder,
            h5py.File(written(state, "keras-h5", "keras", Path(folder))) as file,
        ):
            stored = {key: np.asarray(value) for key, value in file["optimizer"]["vars"].items()}
        optimizer.load_own_variables(stored)
        if rates[0] is not None:
            optimizer.learning_rate.assign(rates[0])
        for grads in updates:
            present = [i for i, path in enumerate(state.params) if path in grads]
            paths = list(state.params)
            given = [keras.ops.convert_to_tensor(grads[paths[i]]) for i in present]
            optimizer.apply(given, [variables[i] for i in present])
        return _state(state, optimizer, variables, len(updates))

    return run


def _name(path: str) -> str:
    return path.replace("/", "_")


def _state(state: TrainState, optimizer: Any, variables: list[Any], updates: int) -> TrainState:
    names = {
        slot: attribute
        for slot, attribute in SLOTS[state.optimizer.schema].items()
        if any(slot in slots for slots in state.slots.values())
    }
    if any("average" in slots for slots in state.slots.values()):
        names["average"] = _AVERAGE
    params = {path: in_memory(_array(one), path) for path, one in zip(state.params, variables, strict=True)}
    slots = {}
    for i, (path, there) in enumerate(state.slots.items()):
        arrays = {name: in_memory(_array(getattr(optimizer, names[name])[i]), name) for name in there}
        rule = state.rules.get(path)
        slots[path] = dict(arrays) if rule is None else canonical_slots("keras", rule, params[path], arrays)
    done = int(np.asarray(optimizer.iterations)) if updates else state.counts.updates
    return replace(state, params=params, slots=slots, counts=replace(state.counts, updates=done))


def _array(value: Any) -> Array:
    return np.array(keras.ops.convert_to_numpy(value))
