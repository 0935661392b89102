"""Whether weights have moved by their momentum: two steps in a row show it, if the rule keeps one moment.

The momentum before an update and after it tells the gradient, and so the whole update. A momentum that is another
parameter's, another step's or transposed tells another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from statekit.arrays.backend import backend
from statekit.errors import StatekitError
from statekit.optim.run import load, mover
from statekit.state.constants import variant_constants
from statekit.state.options import stored_rate
from statekit.state.schema import is_native, load_schema
from statekit.state.train_state import Group, TrainState
from statekit.tensors.tensor import Array, scalar

APART = 0.25
"""How far an update may be from the rule's, of its largest entry.

Originals that round in another order, on a GPU too, stay within 0.2; the momentum of another parameter is beyond 0.5.
Source: docs/bounds.md.
"""
WORK = 1 << 34
"""Products of two numbers that are spent on a pair of checkpoints: all matrices of a small model, some of a large."""
_PER_STEP = 3
"""Products of matrices in an iteration of Newton-Schulz."""


def moved_otherwise(earlier: TrainState, later: TrainState) -> list[str]:
    """Returns the parameters that moved otherwise than their momentum says."""
    if later.counts.updates != earlier.counts.updates + 1:
        return []
    left, wrong = WORK, list[str]()
    for part in earlier.parts():
        for group in part.optimizer.groups:
            for path in _comparable(part, group, later):
                left -= _work(part.params[path].shape, int(group.hyperparameters.get("ns_steps") or 5))
                if left > 0 and _is_apart(part, group, path, later):
                    wrong.append(path)
    return wrong


def _comparable(part: TrainState, group: Group, later: TrainState) -> Iterator[str]:
    """Yields a group's parameters whose momentum tells their gradient, the smallest first."""
    schema, variant = part.optimizer.kind(group)
    if is_native(schema) or variant not in load_schema(schema).stepped:
        return
    if "momentum_buffer" not in variant_constants(schema, str(variant)):
        return
    for path in sorted(group.paths, key=lambda path: math.prod(part.params[path].shape)):
        slots = [state.slots.get(path, {}).get("m") for state in (part, later)]
        if path in later.params and all(slot is not None and slot.dtype == np.float32 for slot in slots):
            yield path


def _work(shape: tuple[int, ...], steps: int) -> int:
    *_, rows, columns = (1, 1, *shape)
    return math.prod(shape) * min(rows, columns) * _PER_STEP * steps


def _is_apart(part: TrainState, group: Group, path: str, later: TrainState) -> bool:
    """Tells whether a parameter moved otherwise than by the update that its momentum tells, at either step's rate."""
    before, after = (state.params[path].read().astype(np.float64) for state in (part, later))
    old, new = (state.slots[path]["m"].read().astype(np.float64) for state in (part, later))
    moved = float(np.max(np.abs(after - before), initial=0.0))
    if not moved or np.array_equal(old, new):
        return False  # it had no gradient, or stands still: that is another finding
    alone = replace(group, paths=(path,))
    state = replace(part.only([path]), optimizer=replace(part.optimizer, groups=(alone,)))
    rates = {
        scalar(stored_rate(moved_group.hyperparameters))
        for moved_group in (group, later.group_of(path))
        if moved_group is not None
    }
    try:
        ends = [_stepped(state, path, _gradient(state, alone, old, new), rate) for rate in rates - {None}]
    except StatekitError:
        return False  # what the step needs isn't known
    return bool(ends) and all(float(np.max(np.abs(end - after))) > APART * moved for end in ends)


def _gradient(state: TrainState, group: Group, old: Array, new: Array) -> Array:
    schema, variant = state.optimizer.kind(group)
    decay = float(scalar(group.hyperparameters["momentum"]))
    sum_of = new - decay * old
    is_mean = variant_constants(schema, str(variant))["momentum_buffer"] == "mean"
    return (sum_of / (1.0 - decay) if is_mean else sum_of).astype(np.float32)


def _stepped(state: TrainState, path: str, grad: Array, rate: float) -> Array:
    xp = backend("numpy")
    return np.asarray(mover(xp, state)(load(xp, state), {path: grad}, (rate,)).params[path], np.float64)
