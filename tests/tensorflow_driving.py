"""Drives the optimizers of statekit.tensorflow over recordings, as somebody would who has variables and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from statekit.arrays.backend import backend
from statekit.arrays.intervals import IntervalBackend
from statekit.optim.run import load, mover
from statekit.state.train_state import TrainState
from statekit.tensorflow.from_checkpoint import built
from statekit.tensors.tensor import DTYPES, Array
from statekit.verify.recording import Recording, Trajectory
from statekit.verify.stepping import named
from statekit.verify.verdict import Row, compare

XP = backend("tensorflow")
Tensors = dict[tuple[str, str], Array]


def variable(path: str, value: Array) -> Any:
    """Makes a variable of a path."""
    *scopes, name = path.split("/")
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(XP.asarray(value), dtype=value.dtype.name, name=name)


@dataclass
class Run:
    """Variables by path, and their optimizer, fresh."""

    variables: dict[str, Any]
    optimizer: Any

    @classmethod
    def begin(cls, state: TrainState, rate: Any) -> Run:
        """Makes variables and an optimizer with a state's parameters and hyperparameters; slots aren't looked at."""
        moved = [path for group in state.optimizer.groups for path in group.paths]
        variables = {path: variable(path, state.params[path].read()) for path in moved}
        rates = rate if isinstance(rate, tuple) else (rate,) * len(state.optimizer.groups)
        groups = tuple(
            replace(group, hyperparameters={**spelled(group.hyperparameters), "learning_rate": rate})
            for group, rate in zip(state.optimizer.groups, rates, strict=True)
        )
        state = replace(state, optimizer=replace(state.optimizer, groups=groups))
        optimizer = built(state, variables, None, {}, "recording")
        optimizer.iterations.assign(state.counts.updates)
        return cls(variables, optimizer)

    def update(self, recording: Recording, update: int) -> None:
        """Makes one recorded update."""
        rate = recording.rate(update)
        if rate is not None:
            self.optimizer.learning_rate = rate[0] if isinstance(rate, tuple) else rate
        grads = recording.gradients(update)
        pairs = [(XP.asarray(grads[p].read()), v) for p, v in self.variables.items() if p in grads]
        self.optimizer.apply_gradients(pairs)

    def place(self, tensors: Tensors, updates: int) -> None:
        """Puts a state into the variables."""
        self.optimizer.iterations.assign(updates)
        for key, target in self._held().items():
            if key in tensors:
                target.assign(XP.asarray(tensors[key].astype(DTYPES[target.dtype.name])))

    def tensors(self) -> Tensors:
        """Returns all values, under the names that replay gives them."""
        return {key: XP.numpy(tf.convert_to_tensor(value)) for key, value in self._held().items()}

    def _held(self) -> dict[tuple[str, str], Any]:
        tensors = {(path, "param"): v.value for path, v in self.variables.items()}
        slots = self.optimizer.slots()
        if self.optimizer.use_ema:
            averages = self.optimizer._model_variables_moving_average
            tensors |= {(p, "average"): a.value for p, a in zip(self.variables, averages, strict=True)}
        return tensors | {(path, name): v for path, tensors in slots.items() for name, v in tensors.items()}


def spelled(said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns hyperparameters with the encoding by its name; the object's was recorded."""
    return {**said, "parameter_encoding": "eighth_power"} if said.get("parameter_encoding") else dict(said)


def verdict(recording: Recording, last: int | None = None) -> Iterator[Row]:
    """Drives a recording from its first state, each update from the recorded state before it; judges every update."""
    trajectory = _judge(recording)
    run, phase = None, None
    for update in range(trajectory.first + 1, (last or recording.last) + 1):
        before = recording.state(update - 1, trajectory, update)
        if run is None or recording.phase(update) != phase:
            run, phase = Run.begin(before, recording.rate(update)), recording.phase(update)
        if update > trajectory.first + 1:
            run.place(read(before), before.counts.updates)
        yield from _judged(recording, trajectory, run, before, update)


def _judge(recording: Recording) -> Trajectory:
    """Returns the trajectory of an original that rounds as we do, if there is one."""
    compiled = [t for t in recording.trajectories if t.execution == "compiled"]
    return (compiled or list(recording.trajectories))[0]


def _judged(
    recording: Recording, trajectory: Trajectory, run: Run, before: TrainState, update: int
) -> Iterator[Row]:
    run.update(recording, update)
    bounds = IntervalBackend(True, sqrt_units=trajectory.sqrt_units)
    grads = {path: bounds.asarray(tensor.read()) for path, tensor in recording.gradients(update).items()}
    live = mover(bounds, before)(load(bounds, before), grads, recording.rate(update))
    interval, got, old = named(live.params, live.slots, live.shared), run.tensors(), read(before)
    for key, recorded in read(recording.outcome(update, trajectory)).items():
        if key[0] in run.variables or key[0].startswith("groups/"):
            yield compare(update, *key, got[key], recorded, old.get(key, recorded), interval[key])
    counted(run, before)


def counted(run: Run, before: TrainState) -> None:
    """Checks that the update was counted."""
    assert int(run.optimizer.iterations.numpy()) == before.counts.updates + 1


def read(state: TrainState) -> Tensors:
    shared = [group.slots for group in state.optimizer.groups]
    return {key: np.asarray(t.read()) for key, t in named(state.params, state.slots, shared).items()}
