"""Descriptions of ScaledAdam, of all generations.

What counts, in this order: `extra.param_groups` and `extra.learning_rate_per_group`, then `hyperparameters`;
`extra.generation` is the variant. PyTorch's kernels contract products and sums, so all ran compiled.
`resumed_trajectory.safetensors`, where there is one, is the original after its own, inexact load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statekit.state.schema import load_schema
from statekit.verify.contract import FORMAT, TRAJECTORY
from statekit.verify.systems.schema_named import require_known

RESUMED = "resumed_trajectory.safetensors"


def _options(meta: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    schema, variant = load_schema("scaled_adam"), str(meta["extra"]["generation"])
    for given in (meta["hyperparameters"], group):
        require_known(schema, variant, given)
    hyperparameters = schema.hyperparameters
    general = {
        name: meta["hyperparameters"][name] for name in hyperparameters if name in meta["hyperparameters"]
    }
    return {**general, **group}


def describe(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `recording.json` for a ScaledAdam `meta.json`."""
    extra, steps, saved = meta["extra"], int(meta["steps"]), int(meta["checkpoint_step"])
    trajectories: list[dict[str, Any]] = [{"file": TRAJECTORY, "execution": "compiled"}]
    if (folder / RESUMED).is_file():
        trajectories.append({"file": RESUMED, "execution": "compiled", "first": saved})
    return {
        "format": FORMAT,
        "version": 1,
        "system": "scaled_adam",
        "steps": [0, steps],
        "phases": [
            {
                "updates": [1, steps],
                "hyperparameters": {
                    "generation": extra["generation"],
                    "param_groups": [_options(meta, group) for group in extra["param_groups"]],
                },
            }
        ],
        "learning_rate": [list(rates) for rates in extra["learning_rate_per_group"]],
        "trajectories": trajectories,
        "checkpoint": {"path": meta["checkpoint"]["files"][0], "step": saved},
    }
