"""Our step beside a living original's, update by update, within the derived bound."""

from __future__ import annotations

from typing import Any

import numpy as np

from living.originals import RUNS, Case
from statekit.arrays.backend import Backend
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.optim.run import kernels_contract, load, mover, store
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array
from statekit.verify.intervals import IntervalBackend
from statekit.verify.replay import named
from statekit.verify.verdict import compare

SQRT_UNITS = {"torch": 2.0, "transformers": 2.0, "optax": 2.0, "keras": 8.0}
"""How far an original's square roots may be from the exact ones, in units of 2^-24."""


def faults(case: Case, xp: Backend | None = None) -> list[str]:
    """Returns where an update of ours or of the original leaves the bound; each from the original's own state."""
    xp, run = xp or NumpyBackend(), RUNS[case.library](case)
    found = []
    before = run.state()
    for update in range(len(case.grads)):
        grads = case.gradients(update)
        run.update(grads)
        after = run.state()
        found += [f"update {update + 1}: {one}" for one in differences(case, xp, before, after, grads)]
        before = after
    return found


def differences(
    case: Case, xp: Backend, before: TrainState, after: TrainState, grads: dict[str, Array]
) -> list[str]:
    """Returns the tensors that leave the bound in one update, with an example of each."""
    contracted = xp.contracts or case.execution == "compiled" or kernels_contract(before)
    bounds = IntervalBackend(contracted, sqrt_units=max(SQRT_UNITS[case.library], xp.sqrt_units))
    rates = tuple(_rate(case.library, arguments) for arguments, _ in case.groups)
    ours = store(xp, _moved(case, xp, before, grads, rates), before)
    bound = _moved(case, bounds, before, grads, rates)
    intervals = named(bound.params, bound.slots, bound.shared)
    old, got, theirs = (_tensors(state) for state in (before, ours, after))
    found = []
    for key, recorded in theirs.items():
        row = compare(1, *key, got[key], recorded, old[key], intervals[key])
        if row.outside or recorded.dtype != got[key].dtype:
            found.append(f"{' '.join(key)} {recorded.dtype.name}: {row.outside} outside, {row.example}")
    if got.keys() != theirs.keys():
        found.append(f"only one has {got.keys() ^ theirs.keys()}")
    counts = [
        {path: state.counts.behind.get(path, state.counts.updates) for path in state.params}
        for state in (ours, after)
    ]
    if counts[0] != counts[1]:
        found.append(f"counts {counts[0]}, the original's {counts[1]}")
    return found


def _rate(library: str, arguments: Any) -> float | None:
    """Returns the learning rate as the original holds it: Keras in a float32 variable."""
    for name in ("learning_rate", "lr"):
        if name in arguments and arguments[name] is not None:
            return float(np.float32(arguments[name]) if library == "keras" else arguments[name])
    return None


def _moved(case: Case, xp: Backend, state: TrainState, grads: dict[str, Array], rates: Any) -> Any:
    move = mover(xp, state, case.execution)
    held = {path: xp.asarray(grad) for path, grad in grads.items()}
    with np.errstate(all="ignore"):
        return move(load(xp, state), held, rates)


def _tensors(state: TrainState) -> dict[tuple[str, str], Array]:
    return {key: tensor.read() for key, tensor in named(state.params, state.slots, []).items()}
