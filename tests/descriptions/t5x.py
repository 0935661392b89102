"""Descriptions of T5X.

What counts, in this order: `extra.phases`, then `hyperparameters`; with logical factor rules also
`extra.logical_axes`. `trajectory.safetensors` ran op by op unless `extra.execution` says otherwise;
`trajectory_jit.safetensors` ran compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statekit.verify.contract import FORMAT, TRAJECTORY


def describe(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
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
