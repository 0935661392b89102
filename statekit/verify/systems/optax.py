"""Recordings of Optax, each slot under the path of its link in the chain: `1.0.mu`; jitted.

What counts in `meta.json`: `hyperparameters`, in Optax' names, or by the names of the chain's links; a clipping link
stands before the optimizer, and a mask is described in words. `extra.factored_dims_d1_d0` says which axes are factored.

MultiSteps counts micro-batches; what is replayed are its updates, each with the running mean of its gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from statekit.errors import NotFoundError
from statekit.files.safetensors import open_safetensors
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis
from statekit.tensors.tensor import Tensor
from statekit.verify.contract import TRAJECTORY
from statekit.verify.systems.schema_named import aliases, described, kind

KINDS = {
    "adamw": ("adamw", "optax"),
    "lamb": ("lamb", "optax"),
    "adafactor": ("adafactor", "optax"),
    "scale_by_factored_rms": ("adafactor", "optax"),
}
MASKS = {"ndim > 1": lambda shape: len(shape) > 1}
"""Which parameters are decayed, by the words for it."""
ABSENT: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"amsgrad": False, "nesterov": False},
    "lamb": {},
    "adafactor": {"dtype_momentum": "float32"},
}
"""What a link isn't unless it says so; AMSGrad is another link."""
BARE = {"momentum": None, "weight_decay_rate": None}
"""What a chain of links doesn't do unless one of them does."""
GRADIENTS_PER_UPDATE = "every_k_schedule"


def describe(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `recording.json` for Optax' `meta.json`."""
    schema, variant = kind(meta, KINDS)
    arguments = _arguments(meta["hyperparameters"])
    group = {
        **ABSENT[schema],
        **arguments,
        "exclude_from_weight_decay": _excluded(
            meta, arguments.get("mask", arguments.get("weight_decay_mask"))
        ),
        "clipvalue": arguments.get("clip"),
        "global_norm_clip_threshold": arguments.get("clip_by_global_norm"),
        "params": list(meta["params"]),
    }
    spec = {"schema": schema, "variant": variant, "groups": [group], **_names(folder, schema, variant)}
    if "factored_dims_d1_d0" in meta["extra"]:
        spec["rules"] = _rules(meta)
    recorded = described(
        meta, [(1, int(meta["steps"]), spec)], _path(meta["checkpoint"]["files"]), "compiled"
    )
    return _by_update(recorded, arguments.get(GRADIENTS_PER_UPDATE, 1))


def _path(files: Sequence[str]) -> str:
    """Returns the checkpoint's folder or file: Orbax marks a folder by the metadata in it, Flax writes a file."""
    marked = [name for name in files if name.endswith("/_CHECKPOINT_METADATA")]
    return marked[0].rpartition("/")[0] if marked else files[0]


def _arguments(hyperparameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns hyperparameters under the names of adafactor(), if a chain of its links is described."""
    if "scale_by_factored_rms" not in hyperparameters:
        return hyperparameters
    floor = hyperparameters.get("scale_by_param_block_rms")
    usual = load_schema("adafactor").settings("optax")["epsilon2"]
    if floor not in (None, usual):
        raise NotFoundError(
            "adafactor() has another floor of the parameter scale.", expected=usual, found=floor
        )
    return {
        **BARE,
        **hyperparameters,
        **hyperparameters["scale_by_factored_rms"],
        "eps": hyperparameters["scale_by_factored_rms"]["epsilon"],
        "clipping_threshold": hyperparameters.get("clip_by_block_rms"),
        "multiply_by_parameter_scale": floor is not None,
    }


def _excluded(meta: Mapping[str, Any], mask: str | None) -> dict[str, bool] | None:
    if mask is None:
        return None
    if mask not in MASKS:
        raise NotFoundError("A mask is described in unknown words.", expected=", ".join(MASKS), found=mask)
    return {path: not MASKS[mask](spec["shape"]) for path, spec in meta["params"].items()}


def _rules(meta: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the labels of each parameter's axes: v_row averages the largest (d0) away, v_col the second largest."""
    rules = {}
    for path, dims in meta["extra"]["factored_dims_d1_d0"].items():
        labels = [Axis.NONE.value] * len(meta["params"][path]["shape"])
        if dims is not None:
            labels[dims[0]], labels[dims[1]] = Axis.ROW.value, Axis.COLUMN.value
        rules[path] = labels
    return rules


def _names(folder: Path, schema: str, variant: str) -> dict[str, Any]:
    """Returns how the chain's links are numbered in this recording: `slots`, `counts` and `constants` of a phase."""
    last_part = {native: name for name, native in aliases(load_schema(schema), variant, {}).items()}
    opened = open_safetensors(folder / TRAJECTORY)
    slots = {native for name in opened.tensors if "/slot/" in name and (native := name.rpartition("/")[2])}
    globals_ = {
        name[len("0/global/") :]: tensor
        for name, tensor in opened.tensors.items()
        if name.startswith("0/global/")
    }
    counts = sorted(name for name in globals_ if name.endswith(("count", "gradient_step")))
    constants = {
        "globals": {name: _constant(tensor) for name, tensor in globals_.items() if name not in counts},
        "slots": {name: [0.0, None] for name in slots if name == "acc_grads"},
    }
    opened.close()
    names = {
        "slots": {
            last_part[last]: native
            for native in sorted(slots)
            if (last := native.rpartition(".")[2]) in last_part
        },
        "counts": {"globals": counts, "dtype": "int32"},
    }
    return {**names, "constants": constants} if any(constants.values()) else names


def _constant(tensor: Tensor) -> list[Any]:
    return [tensor.read().item(), tensor.dtype.name]


def _by_update(recorded: dict[str, Any], gradients: int) -> dict[str, Any]:
    """Returns a description whose steps are updates, each of several gradients; unfinished ones are left out."""
    if gradients == 1:
        return recorded
    updates = recorded["steps"][1] // gradients
    phase, checkpoint = recorded["phases"][0], recorded["checkpoint"]
    return {
        **recorded,
        "steps": [0, updates],
        "gradients_per_update": gradients,
        "phases": [{**phase, "updates": [1, updates]}],
        "learning_rate": recorded["learning_rate"][gradients - 1 :: gradients],
        "checkpoint": {**checkpoint, "step": checkpoint["step"] // gradients},
    }
