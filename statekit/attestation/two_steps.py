"""What is wrong between two steps of a run: what should have moved and hasn't, and what shouldn't have and has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.attestation.attestation import Finding
from statekit.attestation.faults import fault
from statekit.attestation.implied_updates import moved_otherwise
from statekit.attestation.one_step import SMALL
from statekit.attestation.reading import Key, Readings, place
from statekit.state.comparison import compare_states
from statekit.state.factoring import FACTORED
from statekit.state.run import run_of
from statekit.state.schema import WEIGHTS
from statekit.state.stored_params import MASTER
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array, nbytes

_PER_UPDATE = ("learning_rate", "rescale_grad")
"""Hyperparameters that may be others with every update."""
_CYCLED = ("beta1", "momentum")
"""Hyperparameters that a schedule may move together with the learning rate."""
_LAGGING = frozenset({"param_rms", "scale_exp_avg_sq", "average", "v_max", MASTER})
"""Slots that don't move with every update, or with their parameter alone."""
_LEAST_SKETCH = 16
_CLEARLY = 0.5
"""How much nearer v_row must be to the earlier v_col than to the earlier v_row: far from chance among 16 values."""


@dataclass(frozen=True)
class Step:
    """A checkpoint of a run that was read."""

    state: TrainState
    read: Readings


def are_of_one_run(earlier: TrainState, later: TrainState) -> bool:
    """Tells whether two states may be steps of one run: of one optimizer, and of mostly the same parameters."""
    shapes = [{(path, param.shape) for path, param in side.params.items()} for side in (earlier, later)]
    schemas = [{schema for schema, _ in side.optimizer.kinds} for side in (earlier, later)]
    common = shapes[0] & shapes[1]
    return 2 * len(common) > max(map(len, shapes)) and schemas[0] == schemas[1] != {WEIGHTS}


def between_steps(earlier: Step, later: Step) -> Iterator[Finding]:
    """Yields what is wrong between two steps of a run."""
    gone = [place((path, "")) for path in earlier.state.params if path not in later.state.params]
    if gone:
        yield fault("parts-missing", gone, "the parameters of the step before", "nothing")
    lost = [
        place((path, name))
        for path, slots in earlier.state.slots.items()
        if path in later.state.params
        for name in slots
        if name not in later.state.slots.get(path, {})
    ]
    if lost:
        yield fault("slot-missing", lost, "the slots of the step before", "nothing")
    yield from _of_values(earlier, later)
    yield from _exchanged(earlier, later)
    yield from _options(earlier.state, later.state)
    if moved := moved_otherwise(earlier.state, later.state):
        yield fault("momentum-differs", [place((path, "m")) for path in moved], *_AS_MOVED)


@dataclass(frozen=True)
class _Changes:
    """What has other bits than at the step before.

    Attributes:
        moved: Parameters that have.
        slots: Whether a slot has the same bits, where that can be told.
        stale: Parameters all of whose moments have the same bits.
        live: Parameters of which a moment has others.
    """

    moved: Set[str]
    slots: Mapping[Key, bool]
    stale: Set[str]
    live: Set[str]


def _changes(earlier: Step, later: Step) -> _Changes:
    slots = {
        (path, name): same
        for path, param_slots in later.state.slots.items()
        for name in param_slots
        if (same := _same(earlier, later, path, name)) is not None
    }
    moments: dict[str, list[bool]] = {}
    for (path, name), same in slots.items():
        if name not in _LAGGING and not later.read.tensors[path, name].is_zero:
            moments.setdefault(path, []).append(same)
    stale = {path for path, same in moments.items() if all(same)}
    moved = {path for path in later.state.params if _same(earlier, later, path, "") is False}
    return _Changes(moved, slots, stale, moments.keys() - stale)


_AS_MOVED = "a momentum that makes the step between the two checkpoints", "one that makes another"
_OTHERS, _EQUAL = "other values than at the step before", "the same bits"


def _of_values(earlier: Step, later: Step) -> Iterator[Finding]:
    changes = _changes(earlier, later)
    before, after = earlier.state.counts.done, later.state.counts.done
    if slots := _stale_slots(later, changes, is_counted=before != after):
        yield fault("moments-stale", slots, _OTHERS, _EQUAL)
    if changes.live and not changes.moved and not _resting(later.state):
        params = [place((path, "")) for path in later.state.params if path in changes.live]
        yield fault("weights-stale", params, _OTHERS, _EQUAL)
    elif changes.live and (mixed := _mixed(earlier, later, changes)):
        yield fault("tensors-stale", [place((path, "")) for path in mixed], _OTHERS, _EQUAL)
    if changes.live and before == after is not None:
        yield fault("count-stale", ["updates"], f"more than {before}", after)


def _stale_slots(later: Step, changes: _Changes, is_counted: bool) -> list[str]:
    """Returns the slots that stand still although their parameter, their count or their fellows have moved on."""
    if changes.stale and not changes.live and (changes.moved or is_counted):
        return [f"slots/{path}" for path in later.state.params if path in changes.stale]
    whole = [f"slots/{path}" for path in later.state.params if path in changes.stale & changes.moved]
    # Beside a moment that has moved, one that an update reaches has too.
    single = [
        place(key)
        for key, same in changes.slots.items()
        if same and key[0] in changes.live and key[1] not in _LAGGING and _moves(later, key)
    ]
    return whole + single


def _mixed(earlier: Step, later: Step, changes: _Changes) -> list[str]:
    """Returns the parameters that have counted an update, and have neither moved nor moments that have."""
    still = changes.stale - changes.moved
    return [
        path for path in later.state.params if path in still and _count(later, path) != _count(earlier, path)
    ]


def _same(earlier: Step, later: Step, path: str, name: str) -> bool | None:
    """Tells whether a tensor has the bits of the step before; None where that can't be said, or is chance."""
    digests = [side.read.digest(path, name) for side in (earlier, later)]
    tensor = later.state.slots[path][name] if name else later.state.params[path]
    if None in digests or nbytes(tensor) < SMALL:
        return None
    return digests[0] == digests[1]


def _moves(step: Step, key: Key) -> bool:
    """Tells whether a slot that an update reaches has other bits after it: in few bits a decay may round to nothing."""
    path, name = key
    return not step.read.tensors[key].is_zero and step.state.slots[path][name].dtype.itemsize >= 4


def _count(step: Step, path: str) -> int:
    return step.state.counts.behind.get(path, step.state.counts.updates)


def _resting(state: TrainState) -> bool:
    """Tells whether a learning rate of zero, or a rounding to few bits, may keep parameters where they are."""
    rates = [group.hyperparameters.get("learning_rate") for group in state.optimizer.groups]
    return 0 in rates or any(param.dtype.itemsize < 4 for param in state.params.values())


def _are_crossed(path: str, earlier: Step, later: Step) -> bool:
    """Tells whether the values of each factor clearly go on from those of the other one."""
    tensors = [step.read.tensors.get((path, name)) for step in (earlier, later) for name in FACTORED]
    sketches = [tensor.sketch for tensor in tensors if tensor is not None and tensor.sketch is not None]
    if len(sketches) < len(tensors) or len(sketches[0]) < _LEAST_SKETCH:
        return False
    row, column, next_row, next_column = sketches
    straight = _apart(row, next_row) + _apart(column, next_column)
    across = _apart(row, next_column) + _apart(column, next_row)
    return across < _CLEARLY * straight


def _exchanged(earlier: Step, later: Step) -> Iterator[Finding]:
    """Yields factored parameters whose v_row goes on where v_col stood a step before, and the other way round."""
    exchanged = []
    for path, rule in later.state.rules.items():
        before = earlier.state.rules.get(path)
        if before is not None and before.factored and rule.factored and before.axes != rule.axes:
            exchanged.append(path)
            continue
        if _are_crossed(path, earlier, later):
            exchanged.append(path)
    if exchanged:
        where = [place((path, name)) for path in exchanged for name in FACTORED]
        yield fault(
            "factors-exchanged", where, "v_row and v_col as at the step before", "each in the other's place"
        )


def _apart(first: Array, other: Array) -> float:
    """Returns how far two moments are apart in shape, whatever their size: the mean square of their logarithms' gap."""
    with np.errstate(divide="ignore", invalid="ignore"):
        gap = np.log(np.abs(first)) - np.log(np.abs(other))
    gap = gap[np.isfinite(gap)]
    return float(np.var(gap)) if gap.size else 0.0


def _options(earlier: TrainState, later: TrainState) -> Iterator[Finding]:
    options: dict[str, list[Any]] = {}
    moving = {
        *_PER_UPDATE,
        *(_CYCLED if any(schedule.cycles for schedule in run_of(later.extra).schedules) else ()),
    }
    for difference in compare_states(earlier, later, by_value=lambda path: False).differences:
        if difference.what == "option" and difference.item not in moving:
            options.setdefault(difference.item, []).append(difference)
    for item, differences in options.items():
        where = [difference.place for difference in differences]
        values = (f"{item} {value!r}" for value in (differences[0].expected, differences[0].actual))
        yield fault("hyperparameter-changed", where, *values)
