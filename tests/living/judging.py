"""Our step beside a living original's, update by update, within the derived bound."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from living.drop_ins import Tensors, drop_in, follows
from living.originals import RUNS, Arrays, Case, Sparse
from living.there_and_back import lost
from statekit.arrays.backend import Backend, backend
from statekit.arrays.intervals import Interval, IntervalBackend, gamma
from statekit.optim.run import kernels_contract, load, mover, store
from statekit.optim.steps import Repeated
from statekit.state.train_state import TrainState
from statekit.verify.stepping import named
from statekit.verify.verdict import compare

SQRT_UNITS = {"torch": 2.0, "transformers": 2.0, "optax": 2.0, "keras": 8.0}
"""How far an original's square roots may be from the exact ones, in units of 2^-24."""


def faults(case: Case, xp: Backend | None = None) -> list[str]:
    """Returns where an update of ours or of the original leaves the bound, each from the original's own state.

    Where the case says so, also what our class in the original's framework does, and what of the original's own save
    is another one after it went into a statekit folder and back.
    """
    xp, run = xp or backend(case.backend), RUNS[case.library](case)
    outside = []
    before = run.state()
    rates = tuple(_rate(case.library, arguments) for arguments, _ in case.groups)
    ours = drop_in(case, before, rates) if case.drop_in and follows(case) else None
    for update in range(len(case.grads)):
        grads, rows = case.gradients(update), case.rows(update)
        run.update(grads, rows)
        after = run.state()
        outside += [
            f"update {update + 1}: {one}" for one in differences(case, xp, before, after, grads, rows)
        ]
        if ours is not None:
            got = ours(before, grads, rows)
            bounds = _bounds(case, True, backend("torch").sqrt_units)
            bound = _moved(case, bounds, before, grads, rows, rates)
            outside += [f"update {update + 1}, class: {one}" for one in _outside(got, bound, before, after)]
        before = after
    if case.back:
        with tempfile.TemporaryDirectory() as folder:
            outside += [f"there and back: {one}" for one in lost(case, run, Path(folder))]
    return outside


def differences(
    case: Case, xp: Backend, before: TrainState, after: TrainState, grads: Arrays, rows: Sparse
) -> list[str]:
    """Returns the tensors that leave the bound in one update, with an example of each."""
    contracted = xp.contracts or case.execution == "compiled" or kernels_contract(before)
    rates = tuple(_rate(case.library, arguments) for arguments, _ in case.groups)
    ours = store(xp, _moved(case, xp, before, grads, rows, rates), before)
    bound = _moved(case, _bounds(case, contracted, xp.sqrt_units), before, grads, rows, rates)
    outside = list(_outside(_tensors(ours), bound, before, after))
    counts = [
        {path: state.counts.behind.get(path, state.counts.updates) for path in state.params}
        for state in (ours, after)
    ]
    if counts[0] != counts[1]:
        outside.append(f"counts {counts[0]}, the original's {counts[1]}")
    return outside


def _bounds(case: Case, contracted: bool, sqrt_units: float) -> IntervalBackend:
    return IntervalBackend(contracted, sqrt_units=max(SQRT_UNITS[case.library], sqrt_units))


def _outside(got: Tensors, bound: Any, before: TrainState, after: TrainState) -> Iterator[str]:
    intervals = named(bound.params, bound.slots, bound.shared)
    old, theirs = _tensors(before), _tensors(after)
    for key, recorded in theirs.items():
        if key not in got:
            continue
        row = compare(1, *key, got[key], recorded, old[key], intervals[key])
        if row.outside or recorded.dtype != got[key].dtype:
            yield f"{' '.join(key)} {recorded.dtype.name}: {row.outside} outside, {row.example}"
    if got.keys() != theirs.keys():
        yield f"only one has {got.keys() ^ theirs.keys()}"


def _rate(library: str, arguments: Any) -> float | None:
    """Returns the learning rate as the original holds it: Keras in a float32 variable."""
    for name in ("learning_rate", "lr"):
        if name in arguments and arguments[name] is not None:
            return float(np.float32(arguments[name]) if library == "keras" else arguments[name])
    return None


def _moved(case: Case, xp: Backend, state: TrainState, grads: Arrays, rows: Sparse, rates: Any) -> Any:
    move = mover(xp, state, case.execution)
    arrays = {path: xp.asarray(grad) for path, grad in grads.items()}
    arrays |= {path: _repeated(xp, case, path, *pair) for path, pair in rows.items()}
    with np.errstate(all="ignore"):
        return move(load(xp, state), arrays, rates)


def _repeated(xp: Backend, case: Case, path: str, values: Any, rows: Any) -> Repeated:
    """Returns a gradient of rows as the steps take it: the sum of those that meet, and that of their squares."""
    wide, shape = values.astype(np.float64), case.params[path]

    def total(parts: Any) -> Any:
        whole = np.zeros(shape)
        np.add.at(whole, rows, parts)
        return whole

    sums, squares = total(wide), total(np.square(wide))
    if not isinstance(xp, IntervalBackend):
        return Repeated(*(xp.asarray(one.astype(values.dtype)) for one in (sums, squares)))
    error = gamma(len(rows) + 1)
    return Repeated(
        *(
            Interval(one - error * size, one + error * size, values.dtype.name, xp.contracted)
            for one, size in ((sums, total(np.abs(wide))), (squares, squares))
        )
    )


def _tensors(state: TrainState) -> Tensors:
    return {key: tensor.read() for key, tensor in named(state.params, state.slots, []).items()}
