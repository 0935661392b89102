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
from statekit.verify.contract import FORMAT, TRAJECTORY, Phase

SLOTS = "state/param_states/"
TARGET = "target/"


class T5X:
    """Reads `meta.json` of T5X recordings.

    What counts, in this order: `extra.phases`, then `hyperparameters`; with logical factor rules also
    `extra.logical_axes`. `trajectory.safetensors` ran op by op unless `extra.execution` says otherwise;
    `trajectory_jit.safetensors` ran compiled.
    """

    def describe(self, folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of `recording.json` for T5X's `meta.json`."""
        extra = meta["extra"]
        steps = int(meta["steps"])
        phases = extra.get("phases") or [{"steps": [1, steps], "hyperparameters": meta["hyperparameters"]}]
        eager = str(extra.get("execution", "")).startswith("op-by-op")
        trajectories = [{"file": TRAJECTORY, "execution": "op_by_op" if eager else "compiled"}]
        if (folder / "trajectory_jit.safetensors").is_file():
            trajectories.append({"file": "trajectory_jit.safetensors", "execution": "compiled"})
        return {
            "format": FORMAT,
            "version": 1,
            "system": "t5x",
            "steps": [0, steps],
            "phases": [
                {
                    "updates": list(phase["steps"]),
                    "hyperparameters": {
                        **phase["hyperparameters"],
                        "logical_axes": extra.get("logical_axes"),
                    },
                }
                for phase in phases
            ],
            "learning_rate": list(meta["learning_rate"]),
            "trajectories": trajectories,
            "checkpoint": {"path": meta["checkpoint"]["dir"], "step": int(meta["checkpoint_step"])},
        }

    def decode(self, tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
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

    def encode(self, state: TrainState, phase: Phase) -> dict[str, Tensor]:
        """Returns the tensors of a state under the trajectory's names, through T5X's layout."""
        native = tensor_names(layout("t5x").encode(state).tree)
        params = {f"param/{n[len(TARGET) :]}": t for n, t in native.items() if n.startswith(TARGET)}
        return params | {f"slot/{n[len(SLOTS) :]}": t for n, t in native.items() if n.startswith(SLOTS)}


def _put(tree: dict[str, Any], path: str, leaf: object) -> None:
    *folders, last = path.split("/")
    for part in folders:
        tree = tree.setdefault(part, {})
    tree[last] = leaf
