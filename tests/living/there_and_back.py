"""An original's own save, taken into a statekit folder and back into the original's form, and gone on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import statekit
from living.originals import RUNS, Case, Run
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array
from statekit.verify.stepping import named

FORMS: dict[str, tuple[str, str, str]] = {
    "torch": ("torch", "torch-optim", "back.pt"),
    "transformers": ("torch", "torch-optim", "back.pt"),
    "optax": ("flax", "optax", "back"),
    "keras": ("keras-h5", "keras", "back.weights.h5"),
}
"""Container, layout and file name in which each original is saved."""


def lost(case: Case, run: Run, folder: Path) -> list[str]:
    """Returns what differs, bit for bit, between two originals: of its own save, and of what came back.

    Both then take the case's last update once more. What an original loses of its own save isn't ours: PyTorch casts
    Transformers' float32 slots to the dtype of a parameter of low precision.
    """
    path, file = run.save(folder)
    container, layout, name = FORMS[case.library]
    statekit.convert(path, folder / "neutral", to="statekit", **file)
    more: dict[str, Any] = {"like": path} if case.library == "keras" else {}
    statekit.convert(folder / "neutral", folder / name, to=container, layout=layout, **more)
    runs = [RUNS[case.library](case), RUNS[case.library](case)]
    for one, source in zip(runs, (path, folder / name), strict=True):
        one.load(source)
    differences = [f"loaded, {one}" for one in _unequal(*(one.state() for one in runs))]
    last = len(case.grads) - 1
    for one in runs:
        one.update(case.gradients(last), case.rows(last))
    return differences + [f"one update later, {one}" for one in _unequal(*(one.state() for one in runs))]


def _unequal(mine: TrainState, theirs: TrainState) -> list[str]:
    left, right = _values(mine), _values(theirs)
    differing = [" ".join(key) for key in left if key not in right or not _same(left[key], right[key])]
    counts = [(state.counts.updates, dict(state.counts.behind)) for state in (mine, theirs)]
    return differing + ([f"counts {counts[0]} and {counts[1]}"] if counts[0] != counts[1] else [])


def _values(state: TrainState) -> dict[tuple[str, str], Array]:
    return {key: tensor.read() for key, tensor in named(state.params, state.slots, []).items()}


def _same(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
