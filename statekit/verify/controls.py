"""Controls: faults in the verified state itself. A verification that does not see them proves nothing.

Each is a wrong state that a conversion or a resume could have left. Where one isn't seen, as there is nothing in this
checkpoint to see it by, the certificate says that it proves nothing about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from statekit.optim.run import initial
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, TrainState
from statekit.tensors.tensor import DTYPES, Array, Tensor, in_memory

Change: TypeAlias = Callable[[str, str, Tensor], Array | None]
"""Of a slot by path and name, other values for it; None where it stays."""
EPSILONS = ("epsilon", "epsilon1", "epsilon2", "eps")
MOVED_BY = 10.0
"""How many times as large an epsilon is moved to."""


@dataclass(frozen=True)
class Control:
    """A fault.

    Attributes:
        name: What is wrong.
        make: Returns a state with it; None where a state has nothing that it could be wrong in.
        lacks: Why not, then.
    """

    name: str
    make: Callable[[TrainState, TrainState], TrainState | None]
    lacks: str


def _slots(state: TrainState, change: Change) -> TrainState | None:
    """Returns a state with other values of slots; None if none is another."""
    after: dict[str, dict[str, Tensor]] = {}
    some = False
    for path, slots in state.slots.items():
        after[path] = dict(slots)
        for name, slot in slots.items():
            values = change(path, name, slot)
            if values is not None and values.tobytes() != slot.read().tobytes():
                after[path][name], some = in_memory(values, name), True
    return replace(state, slots=after) if some else None


def is_second_moment(state: TrainState, path: str, name: str) -> bool:
    """Tells whether a slot is a mean of squares, by its schema."""
    group = state.group_of(path)
    schema = None if group is None else load_schema(state.optimizer.kind(group)[0])
    return schema is not None and int(schema.data["slots"][name]["gradient_power"]["power"]) == 2


def is_momentum(state: TrainState, path: str, name: str) -> bool:
    """Tells whether a slot is a mean of updates or gradients, of the parameter's shape."""
    group = state.group_of(path)
    if group is None:
        return False
    slot = load_schema(state.optimizer.kind(group)[0]).slots[name]
    first = not is_second_moment(state, path, name) and name not in ("master", "average")
    return first and slot.shape == "parameter"


def cold(state: TrainState, twin: TrainState) -> TrainState:
    """Returns a state that has its parameters and nothing else: an optimizer that was begun anew."""
    begun = initial(replace(state, counts=Counts(0, 0)))
    return replace(begun, counts=Counts(0, 0))


def _permuted(state: TrainState, twin: TrainState) -> TrainState | None:
    def change(path: str, name: str, slot: Tensor) -> Array | None:
        other = twin.slots.get(path, {}).get(name)
        if other is not None and other.shape == slot.shape and other.dtype == slot.dtype:
            values = other.read()
            if values.tobytes() != slot.read().tobytes():
                return values
        return np.roll(slot.read(), 1) if slot.shape else None

    return _slots(state, change)


def _late(state: TrainState, twin: TrainState) -> TrainState:
    counts = state.counts
    behind = {path: count + 1 for path, count in counts.behind.items()}
    return replace(state, counts=replace(counts, updates=counts.updates + 1, behind=behind))


def _exchanged(state: TrainState, twin: TrainState) -> TrainState | None:
    other = {"v_row": "v_col", "v_col": "v_row"}

    def change(path: str, name: str, slot: Tensor) -> Array | None:
        partner = state.slots[path].get(other.get(name, ""))
        return None if partner is None or partner.shape != slot.shape else partner.read()

    return _slots(state, change)


def _in_bfloat16(state: TrainState, twin: TrainState) -> TrainState | None:
    return _slots(
        state,
        lambda path, name, slot: (
            slot.read().astype(DTYPES["bfloat16"]).astype(slot.dtype) if slot.dtype.kind == "f" else None
        ),
    )


def _dropped(state: TrainState, twin: TrainState) -> TrainState | None:
    begun = cold(state, twin)
    return _slots(
        state,
        lambda path, name, slot: (
            begun.slots[path][name].read() if is_second_moment(state, path, name) else None
        ),
    )


def _zeroed(state: TrainState, twin: TrainState) -> TrainState | None:
    return _slots(
        state, lambda path, name, slot: np.zeros_like(slot.read()) if is_momentum(state, path, name) else None
    )


def _epsilon(name: str) -> Callable[[TrainState, TrainState], TrainState | None]:
    def moved(group: Group) -> Group:
        value = group.hyperparameters.get(name)
        if not isinstance(value, (int, float)) or not value:
            return group
        return replace(group, hyperparameters={**group.hyperparameters, name: value * MOVED_BY})

    def make(state: TrainState, twin: TrainState) -> TrainState | None:
        groups = tuple(map(moved, state.optimizer.groups))
        if groups == state.optimizer.groups:
            return None
        return replace(state, optimizer=replace(state.optimizer, groups=groups))

    return make


def controls_of(state: TrainState) -> list[Control]:
    """Returns the faults that are made of a state."""
    names = {name for group in state.optimizer.groups for name in group.hyperparameters}
    controls = [
        Control("cold start", cold, "it has no slots"),
        Control("permuted slots", _permuted, "no slot has two different elements"),
        Control("wrong step", _late, ""),
        Control("row and column exchanged", _exchanged, "no parameter has a row and a column of equal shape"),
        *(
            Control(f"{name} moved", _epsilon(name), f"{name} is 0 or off")
            for name in EPSILONS
            if name in names
        ),
        Control("moments rounded to bfloat16", _in_bfloat16, "every slot is in bfloat16, or exact there"),
        Control("second moment dropped", _dropped, "it has no second moment, or one that is as at the start"),
        Control("momentum zeroed", _zeroed, "it has no momentum, or one of zeros"),
    ]
    if not names & {*EPSILONS}:
        controls.append(Control("epsilon moved", lambda state, twin: None, "it has no epsilon"))
    return controls
