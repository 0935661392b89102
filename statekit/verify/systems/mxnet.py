"""Recordings of MXNet's LANS: slots mean, var and, beside float16, weight32; a count for each parameter.

What counts in `meta.json`, in this order: `extra.lr_mult`, `extra.wd_mult` and `extra.rescale_grad_used` (a Trainer
sets it at each step), then `hyperparameters`. MXNet's kernels and operators round every operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statekit.state.schema import load_schema
from statekit.verify.systems.schema_named import described, kind

KINDS = {"LANS": ("lans", "mxnet")}


def describe(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `recording.json` for MXNet's `meta.json`."""
    extra, arguments = meta["extra"], meta["hyperparameters"]
    name, _ = kind(meta, KINDS)
    schema = load_schema(name)
    fused = arguments["use_fused_step"]
    variant = next(
        variant for variant in schema.variants if schema.settings(variant).get("use_fused_step") is fused
    )
    scales = extra["rescale_grad_used"]
    starts = [i for i, scale in enumerate(scales) if i == 0 or scale != scales[i - 1]]
    group = {
        **arguments,
        "lr_mult": extra["lr_mult"],
        "wd_mult": extra["wd_mult"],
        "params": sorted(meta["params"], key=extra["param_index"].__getitem__),
    }
    spec = {"schema": schema.name, "variant": variant, "counts": {"slots": ["step_count"], "dtype": "int64"}}
    phases = [
        (first + 1, last, {**spec, "groups": [{**group, "rescale_grad": scales[first]}]})
        for first, last in zip(starts, [*starts[1:], len(scales)], strict=True)
    ]
    return described(meta, phases, meta["checkpoint"]["files"][0], "op_by_op")
