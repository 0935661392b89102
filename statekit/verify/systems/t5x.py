"""Recordings of T5X: native slot names, (1,) placeholders included."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from statekit.conversion.contracts import Hints
from statekit.conversion.registry import layout
from statekit.files.checkpoint import Checkpoint
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor, in_memory
from statekit.tensors.tree import tensor_names
from statekit.verify.contract import Phase

SLOTS = "state/param_states/"
TARGET = "target/"


def decode(tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
    """Returns the canonical state of one step, through T5X's layout."""
    target: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        _put(target if kind == "param" else states, rest, tensor)
        if kind == "param" and not any(n.startswith(f"slot/{rest}/") for n in tensors):
            _put(states, rest, None)
    tree = {
        "target": target,
        "state": {"step": in_memory(np.asarray(step, np.int32), "state/step"), "param_states": states},
    }
    checkpoint = Checkpoint("t5x", Path(f"step {step}"), tree, step=step)
    return layout("t5x").decode(checkpoint, Hints(dict(phase.hyperparameters)))


def encode(state: TrainState, phase: Phase) -> dict[str, Tensor]:
    """Returns the tensors of a state under the trajectory's names, through T5X's layout."""
    native = tensor_names(layout("t5x").encode(state).tree)
    params = {f"param/{n[len(TARGET) :]}": t for n, t in native.items() if n.startswith(TARGET)}
    return params | {f"slot/{n[len(SLOTS) :]}": t for n, t in native.items() if n.startswith(SLOTS)}


def _put(tree: dict[str, Any], path: str, leaf: object) -> None:
    *folders, last = path.split("/")
    for part in folders:
        tree = tree.setdefault(part, {})
    tree[last] = leaf
