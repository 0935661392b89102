"""Recordings of ScaledAdam: slots of equally shaped parameters in one tensor, under the batch's first member."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from statekit.conversion.contracts import Hints
from statekit.conversion.registry import layout
from statekit.files.checkpoint import Checkpoint
from statekit.optim.run import initial
from statekit.optim.scaled_adam_clip import JOINT, batches
from statekit.state.constants import variant_constants
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor, in_memory
from statekit.verify.contract import FORMAT, TRAJECTORY, Phase
from statekit.verify.systems.schema_named import require_known

RESUMED = "resumed_trajectory.safetensors"


class ScaledAdam:
    """Reads `meta.json` of ScaledAdam recordings, of all generations.

    What counts, in this order: `extra.param_groups` and `extra.learning_rate_per_group`, then `hyperparameters`;
    `extra.generation` is the variant. PyTorch's kernels contract products and sums, so all ran compiled.
    `resumed_trajectory.safetensors`, where there is one, is the original after its own, inexact load.
    """

    def describe(self, folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
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

    def decode(self, tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
        """Returns the canonical state of one step, through icefall's layout."""
        options = phase.hyperparameters
        paths = [path for group in options["param_groups"] for path in group["params"]]
        index = {path: i for i, path in enumerate(paths)}
        slots: dict[int, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            path, _, slot = rest.rpartition("/")
            if kind == "slot":
                slots.setdefault(index[path], {})[slot] = step if slot == "step" else tensor
        groups = [
            {**group, "params": [index[path] for path in group["params"]]}
            for group in options["param_groups"]
        ]
        model = {_name(path): tensors[f"param/{path}"] for path in paths}
        tree = {"model": model, "optimizer": {"state": slots, "param_groups": groups}}
        hints = Hints(variant=options["generation"], param_names=tuple(map(_name, paths)))
        checkpoint = Checkpoint("torch", Path(f"step {step}"), tree, step=step)
        state = layout("icefall").decode(checkpoint, hints)
        if step:
            return state
        fresh = initial(state)  # the originals make their slots in the first update
        return replace(fresh, extra={**fresh.extra, JOINT: dict(_joint(fresh))})

    def encode(self, state: TrainState, phase: Phase) -> dict[str, Tensor]:
        """Returns the tensors of a state under the trajectory's names, through icefall's layout."""
        native: Any = layout("icefall").encode(state).tree
        named = {f"param/{path}": tensor for path, tensor in state.params.items()}
        paths = list(state.optimizer.paths)
        for index, slots in native["optimizer"]["state"].items():
            for slot, value in slots.items():
                name = f"slot/{paths[index]}/{slot}"
                named[name] = value if isinstance(value, Tensor) else in_memory(np.asarray(value), name)
        return named


def _name(path: str) -> str:
    return path.replace("/", ".")


def _options(meta: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    schema, variant = load_schema("scaled_adam"), str(meta["extra"]["generation"])
    for given in (meta["hyperparameters"], group):
        require_known(schema, variant, given)
    hyperparameters = schema.hyperparameters
    general = {
        name: meta["hyperparameters"][name] for name in hyperparameters if name in meta["hyperparameters"]
    }
    return {**general, **group}


def _joint(state: TrainState) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields what the seed generation makes for batches of several one-element parameters and never changes.

    Source: RVC-Boss/GPT-SoVITS, GPT_SoVITS/AR/modules/optim.py, `ScaledAdam._init_state`: a mean over no axes is one
    over all of them.
    """
    if (
        variant_constants("scaled_adam", str(state.optimizer.variant))["scalar_size_slots"]
        != "with_several_members"
    ):
        return
    for group in state.optimizer.groups:
        for batch in batches({p: (state.params[p].dtype.name, *state.params[p].shape) for p in group.paths}):
            if "param_rms" in state.slots[batch[0]] or len(batch) == 1:
                continue
            p = np.stack([state.params[path].read() for path in batch])
            axes = tuple(range(1, p.ndim)) or None
            rms = np.sqrt(np.mean(p * p, axis=axes, keepdims=True)).astype(p.dtype)
            history = np.zeros((group.hyperparameters["size_update_period"], *rms.shape), p.dtype)
            slots = {"param_rms": rms, "scale_exp_avg_sq": np.zeros_like(rms), "scale_grads": history}
            yield batch[0], {name: in_memory(array, name) for name, array in slots.items()}
