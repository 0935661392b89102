"""A run in motion: the arrays of a train state in a backend, and the step that moves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol, TypeAlias, cast

from statekit.backend_numpy import NumpyBackend
from statekit.backends import Backend, Value
from statekit.errors import StateError
from statekit.optim.adafactor import Execution
from statekit.state import Counts, Group, Rule, TrainState
from statekit.tensor import Tensor, in_memory

Arrays: TypeAlias = Mapping[str, Value]
Slots: TypeAlias = Mapping[str, Arrays]
Rates: TypeAlias = Value | tuple[Value, ...]
"""A learning rate, or one for each parameter group; a number stays one, as precise as it is."""
Move: TypeAlias = Callable[["Live", Arrays, Rates], "Live"]


class Steps(Protocol):
    """What a module of `statekit.optim` offers for its schema. All functions are pure."""

    VARIANTS: tuple[str, ...]
    """The variants that it steps."""

    def check(self, state: TrainState, group: Group) -> None:
        """Raises UnknownRuleError if a rule or a hyperparameter that the step needs is unknown."""

    def start(
        self, xp: Backend, params: Arrays, rules: Mapping[str, Rule], group: Group, variant: str
    ) -> tuple[Slots, Arrays]:
        """Returns the slots of a group's parameters, and those of the group as a whole, before the first update."""

    def move(
        self,
        xp: Backend,
        params: Arrays,
        grads: Arrays,
        slots: Slots,
        shared: Arrays,
        rules: Mapping[str, Rule],
        group: Group,
        variant: str,
        learning_rate: Value,
        step: Value,
        execution: Execution,
    ) -> tuple[Arrays, Slots, Arrays]:
        """Returns parameters, slots and the group's own slots after one update; `step` updates were done before."""


@dataclass(frozen=True)
class Live:
    """A run's arrays in a backend.

    Attributes:
        params: Parameter by path.
        slots: Slots by path and name.
        shared: Slots of each group as a whole.
        updates: Updates done.
    """

    params: Arrays
    slots: Slots
    shared: tuple[Arrays, ...]
    updates: int


def load(xp: Backend, state: TrainState) -> Live:
    """Reads a state into a backend."""
    return Live(
        _read(xp, state.params),
        {path: _read(xp, slots) for path, slots in state.slots.items()},
        tuple(_read(xp, group.slots) for group in state.optimizer.groups),
        state.counts.updates,
    )


def store(xp: Backend, live: Live, state: TrainState) -> TrainState:
    """Returns `state` with the arrays and the count of a run."""
    groups = tuple(
        replace(group, slots=_written(xp, shared, f"groups/{i}/"))
        for i, (group, shared) in enumerate(zip(state.optimizer.groups, live.shared, strict=True))
    )
    return replace(
        state,
        params=_written(xp, live.params, ""),
        slots={path: _written(xp, slots, f"{path}/") for path, slots in live.slots.items()},
        optimizer=replace(state.optimizer, groups=groups),
        counts=Counts(live.updates, state.counts.schedule + live.updates - state.counts.updates),
    )


def initial(state: TrainState) -> TrainState:
    """Returns `state` with the slots that its optimizer begins with."""
    steps, xp = steps_of(state), NumpyBackend()
    slots: dict[str, Arrays] = {}
    shared = []
    for group in state.optimizer.groups:
        params = _read(xp, {path: state.params[path] for path in group.paths})
        own, whole = steps.start(xp, params, state.rules, group, str(state.optimizer.variant))
        slots.update(own)
        shared.append(whole)
    return store(xp, Live(_read(xp, state.params), slots, tuple(shared), state.counts.updates), state)


def mover(xp: Backend, state: TrainState, execution: Execution = "compiled") -> Move:
    """Returns the step of a state's optimizer: (live, gradients, learning rates) -> live.

    Raises:
        StateError: statekit has no step for the optimizer.
        UnknownRuleError: A factor rule or a hyperparameter is unknown.
    """
    steps, groups, variant = steps_of(state), state.optimizer.groups, str(state.optimizer.variant)
    for group in groups:
        steps.check(state, group)

    def step(live: dict[str, Any], grads: dict[str, Value], rates: Rates, count: Value) -> dict[str, Any]:
        params, slots, shared = dict(live["params"]), dict(live["slots"]), []
        by_group = rates if isinstance(rates, tuple) else (rates,) * len(groups)
        for group, whole, rate in zip(groups, live["shared"], by_group, strict=True):
            new_params, new_slots, new_whole = steps.move(
                xp,
                {path: params[path] for path in group.paths},
                {path: grads[path] for path in group.paths if path in grads},
                {path: slots[path] for path in group.paths},
                whole, state.rules, group, variant, rate, count, execution,
            )  # fmt: skip
            params.update(new_params)
            slots.update(new_slots)
            shared.append(new_whole)
        return {"params": params, "slots": slots, "shared": tuple(shared)}

    compiled = xp.compile(step)

    def move(live: Live, grads: Arrays, rates: Rates) -> Live:
        before = {"params": live.params, "slots": live.slots, "shared": live.shared}
        after = compiled(before, dict(grads), rates, live.updates)
        return Live(after["params"], after["slots"], after["shared"], live.updates + 1)

    return move


def steps_of(state: TrainState) -> Steps:
    """Returns the module that steps a state's optimizer.

    Raises:
        StateError: There is none for the schema or the variant.
    """
    schema, variant = state.optimizer.schema, state.optimizer.variant
    steps = cast(Steps, import_module(f"statekit.optim.{schema}")) if schema in STEPPED else None
    if steps is None or variant not in steps.VARIANTS:
        raise StateError(
            "statekit can't step this optimizer.",
            expected=f"variant {', '.join(steps.VARIANTS)}" if steps else f"one of {', '.join(STEPPED)}",
            found=f"{schema}, variant {variant or 'unknown'}",
            remedy="name the variant" if variant is None else "",
        )
    return steps


STEPPED = ("adafactor", "adamw", "lamb", "lans", "scaled_adam")
"""Schemas that have a module of steps."""


def _read(xp: Backend, tensors: Mapping[str, Tensor]) -> dict[str, Value]:
    return {name: xp.asarray(tensor.read()) for name, tensor in tensors.items()}


def _written(xp: Backend, values: Arrays, prefix: str) -> dict[str, Tensor]:
    return {name: in_memory(xp.numpy(value), f"{prefix}{name}") for name, value in values.items()}
