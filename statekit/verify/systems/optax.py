"""Recordings of Optax, each slot under the path of its link in the chain: `1.0.mu`; jitted.

What counts in `meta.json`: `hyperparameters`, in Optax' names; `clip` is another link, before the optimizer, and a mask
is described in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statekit.converters.containers.safetensors_file import open_safetensors
from statekit.errors import NotFoundError
from statekit.schema import load_schema
from statekit.verify.phases import TRAJECTORY
from statekit.verify.systems.aliased import aliases, described, kind

KINDS = {"adamw": ("adamw", "optax"), "lamb": ("lamb", "optax")}
MASKS = {"ndim > 1": lambda shape: len(shape) > 1}
"""Which parameters are decayed, by the words for it."""
ABSENT = {"adamw": {"amsgrad": False, "nesterov": False}, "lamb": {}}
"""What a link isn't unless it says so; AMSGrad is another link."""


def describe(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `recording.json` for Optax' `meta.json`."""
    arguments = meta["hyperparameters"]
    schema, variant = kind(meta, KINDS)
    group = {
        **ABSENT[schema],
        **arguments,
        "exclude_from_weight_decay": _excluded(meta, arguments["mask"]),
        "clipvalue": arguments.get("clip"),
        "global_norm_clip_threshold": arguments.get("clip_by_global_norm"),
        "params": list(meta["params"]),
    }
    told = {"schema": schema, "variant": variant, "groups": [group], **_names(folder, schema, variant)}
    checkpoint = meta["checkpoint"]
    path = checkpoint.get("dir") or checkpoint["files"][0].partition("/")[0]
    return described(meta, [(1, int(meta["steps"]), told)], path, "compiled")


def _excluded(meta: Mapping[str, Any], mask: str | None) -> dict[str, bool] | None:
    if mask is None:
        return None
    if mask not in MASKS:
        raise NotFoundError("A mask is described in unknown words.", expected=", ".join(MASKS), found=mask)
    return {path: not MASKS[mask](spec["shape"]) for path, spec in meta["params"].items()}


def _names(folder: Path, schema: str, variant: str) -> dict[str, Any]:
    """Returns how the chain's links are numbered in this recording: `slots` and `counts` of a phase."""
    last_part = {native: name for name, native in aliases(load_schema(schema), variant, {}).items()}
    opened = open_safetensors(folder / TRAJECTORY)
    names = list(opened.tensors)
    opened.close()
    slots = {native for name in names if "/slot/" in name and (native := name.rpartition("/")[2])}
    counts = {
        name.partition("/global/")[2] for name in names if name.endswith("count") and "/global/" in name
    }
    return {
        "slots": {last_part[native.rpartition(".")[2]]: native for native in sorted(slots)},
        "counts": {"globals": sorted(counts), "dtype": "int32"},
    }
