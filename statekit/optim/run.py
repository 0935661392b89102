"""A run in motion: the arrays of a train state in a backend, and the step that moves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from statekit.backends import Backend, NumpyBackend, Value
from statekit.errors import StateError
from statekit.optim import adafactor
from statekit.optim.adafactor import Execution
from statekit.state import Counts, TrainState
from statekit.tensor import in_memory

Grads: TypeAlias = Mapping[str, Value]
Move: TypeAlias = Callable[["Live", Grads, Value], "Live"]


@dataclass(frozen=True)
class Live:
    """Parameters and slots as a backend's arrays, by path and slot name, and the number of updates done."""

    params: Mapping[str, Value]
    slots: Mapping[str, Mapping[str, Value]]
    updates: int


def load(xp: Backend, state: TrainState) -> Live:
    """Reads a state into a backend."""
    return Live(
        {path: xp.asarray(tensor.read()) for path, tensor in state.params.items()},
        {
            path: {name: xp.asarray(t.read()) for name, t in slots.items()}
            for path, slots in state.slots.items()
        },
        state.counts.updates,
    )


def store(xp: Backend, live: Live, state: TrainState) -> TrainState:
    """Returns `state` with the arrays and the count of a run."""
    return replace(
        state,
        params={path: in_memory(xp.numpy(value), path) for path, value in live.params.items()},
        slots={
            path: {name: in_memory(xp.numpy(value), f"{path}/{name}") for name, value in slots.items()}
            for path, slots in live.slots.items()
        },
        counts=Counts(live.updates, state.counts.schedule + live.updates - state.counts.updates),
    )


def initial(state: TrainState) -> TrainState:
    """Returns `state` with the slots that its optimizer begins with."""
    module = _module(state)
    xp = NumpyBackend()
    slots = {
        path: {
            name: in_memory(xp.numpy(value), f"{path}/{name}")
            for name, value in module.init(
                xp,
                xp.asarray(state.params[path].read()),
                state.rules[path],
                module.hyperparameters(group, path),
            ).items()
        }
        for group in state.optimizer.groups
        for path in group.paths
    }
    return replace(state, slots=slots)


def mover(xp: Backend, state: TrainState, execution: Execution = "compiled") -> Move:
    """Returns the step of a state's optimizer: (live, gradients, learning rate) -> live.

    Raises:
        UnknownRuleError: A factor rule or a hyperparameter is unknown.
    """
    module = _module(state)
    groups = state.optimizer.groups
    for group in groups:
        for path in group.paths:
            module.check_rule(state.rules.get(path), path, len(state.params[path].shape))
            module.hyperparameters(group, path)

    def step(live: dict[str, Any], grads: dict[str, Value], rate: Value, count: Value) -> dict[str, Any]:
        params, slots = dict(live["params"]), dict(live["slots"])
        for group in groups:
            new_params, new_slots = module.group_update(
                xp,
                {path: params[path] for path in group.paths},
                {path: grads[path] for path in group.paths if path in grads},
                {path: slots[path] for path in group.paths},
                state.rules, group, rate, count, execution,
            )  # fmt: skip
            params.update(new_params)
            slots.update(new_slots)
        return {"params": params, "slots": slots}

    compiled = xp.compile(step)

    def move(live: Live, grads: Grads, rate: Value) -> Live:
        moved = compiled({"params": live.params, "slots": live.slots}, dict(grads), rate, live.updates)
        return Live(moved["params"], moved["slots"], live.updates + 1)

    return move


def _module(state: TrainState) -> Any:
    if (state.optimizer.schema, state.optimizer.variant) != ("adafactor", "t5x"):
        raise StateError(
            "statekit can't step this optimizer yet.",
            expected="adafactor, variant t5x",
            found=f"{state.optimizer.schema}, variant {state.optimizer.variant}",
        )
    return adafactor
