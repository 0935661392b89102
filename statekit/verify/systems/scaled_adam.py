"""Recordings of ScaledAdam: slots of equally shaped parameters in one tensor, under the batch's first member."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from statekit.optim.run import initial
from statekit.optim.scaled_adam_clip import batches
from statekit.state.constants import variant_constants
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import Array, Tensor, in_memory
from statekit.verify.contract import FORMAT, TRAJECTORY, Phase

RESUMED = "resumed_trajectory.safetensors"
JOINT = "unused_size_slots"
"""In a state's extra: what the seed generation keeps for a batch of one-element parameters and never uses."""

_BY_ROW = ("scale_grads",)
"""Slots whose member axis is the second: the first is the period."""
_SIZE = ("param_rms", "scale_exp_avg_sq", "scale_grads")


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
        """Returns the canonical state of one step, each batch split into its members."""
        options = phase.hyperparameters
        params = {name[len("param/") :]: t for name, t in tensors.items() if name.startswith("param/")}
        groups = tuple(_group(group) for group in options["param_groups"])
        ordered = {path: params[path] for group in groups for path in group.paths}
        state = TrainState(
            ordered, {}, Optimizer("scaled_adam", options["generation"], groups), Counts(step, step)
        )
        fresh = initial(state)
        if step == 0:
            return replace(fresh, extra={JOINT: dict(_joint(fresh))})
        arrays = {name[len("slot/") :]: t.read() for name, t in tensors.items() if name.startswith("slot/")}
        return _filled(fresh, arrays)

    def encode(self, state: TrainState, phase: Phase) -> dict[str, Tensor]:
        """Returns the tensors of a state under the trajectory's names, members stacked into batches."""
        named = {f"param/{path}": tensor for path, tensor in state.params.items()}
        if state.counts.updates == 0:  # the originals make their slots in the first update
            return named
        slots: dict[str, Array] = {}
        for group in state.optimizer.groups:
            order = _batches(state, group)
            for batch in order:
                slots |= {f"{batch[0]}/{name}": array for name, array in _stacked(state, batch).items()}
                slots[f"{batch[0]}/step"] = np.asarray(state.counts.updates, np.int64)
            slots |= {f"{order[0][0]}/{name}": array for name, array in _shared(state, group).items()}
        for holder, unused in state.extra.get(JOINT, {}).items():
            slots |= {f"{holder}/{name}": tensor.read() for name, tensor in unused.items()}
        return named | {f"slot/{name}": in_memory(array, name) for name, array in slots.items()}


def _options(meta: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    known = load_schema("scaled_adam").hyperparameters
    general = {name: meta["hyperparameters"][name] for name in known if name in meta["hyperparameters"]}
    return {**general, **group}


def _group(options: Mapping[str, Any]) -> Group:
    values = {name: value for name, value in options.items() if name != "params"}
    return Group(tuple(options["params"]), values, dict.fromkeys(values, "file"))


def _batches(state: TrainState, group: Group) -> tuple[tuple[str, ...], ...]:
    return batches({path: (state.params[path].dtype.name, *state.params[path].shape) for path in group.paths})


def _filled(state: TrainState, arrays: Mapping[str, Array]) -> TrainState:
    """Returns a state with the slots of a step; what isn't recorded yet stays at its first value."""
    slots: dict[str, dict[str, Tensor]] = {path: {} for path in state.params}
    joint: dict[str, dict[str, Tensor]] = {}
    groups = []
    for group in state.optimizer.groups:
        order = _batches(state, group)
        for batch in order:
            alone = "param_rms" not in state.slots[batch[0]]
            for name in (*state.slots[batch[0]], *(_SIZE if alone else ())):
                array = arrays.get(f"{batch[0]}/{name}")
                if array is None:
                    continue
                if alone and name in _SIZE:
                    joint.setdefault(batch[0], {})[name] = in_memory(array, name)
                    continue
                for place, path in enumerate(batch):
                    part = array[:, place] if name in _BY_ROW else array[place]
                    slots[path][name] = in_memory(part, f"{path}/{name}")
        holder = order[0][0]
        recorded = {name: arrays.get(f"{holder}/{name}") for name in group.slots}
        own = {
            name: tensor if (array := recorded[name]) is None else in_memory(array, name)
            for name, tensor in group.slots.items()
        }
        groups.append(replace(group, slots=own))
    optimizer = replace(state.optimizer, groups=tuple(groups))
    return replace(state, slots=slots, optimizer=optimizer, extra={JOINT: joint})


def _stacked(state: TrainState, batch: tuple[str, ...]) -> dict[str, Array]:
    members = [state.slots[path] for path in batch]
    return {
        name: np.stack([member[name].read() for member in members], axis=int(name in _BY_ROW))
        for name in members[0]
    }


def _shared(state: TrainState, group: Group) -> dict[str, Array]:
    """Returns the group's own slots that the original has by now."""
    if state.counts.updates < 2 or not group.slots:
        return {}
    own = {name: tensor.read() for name, tensor in group.slots.items()}
    threshold = own["model_norm_threshold"].astype(np.float64)
    if np.isposinf(threshold):  # not estimated yet
        return {"model_norms": own["model_norms"]}
    return {**own, "model_norm_threshold": threshold, "num_clipped": own["num_clipped"].astype(np.int64)}


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
        for batch in _batches(state, group):
            if "param_rms" in state.slots[batch[0]] or len(batch) == 1:
                continue
            p = np.stack([state.params[path].read() for path in batch])
            axes = tuple(range(1, p.ndim)) or None
            rms = np.sqrt(np.mean(p * p, axis=axes, keepdims=True)).astype(p.dtype)
            history = np.zeros((group.hyperparameters["size_update_period"], *rms.shape), p.dtype)
            made = {"param_rms": rms, "scale_exp_avg_sq": np.zeros_like(rms), "scale_grads": history}
            yield batch[0], {name: in_memory(array, name) for name, array in made.items()}
