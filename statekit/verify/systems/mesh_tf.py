"""Recordings of Mesh-TensorFlow and GPT-Neo under TensorFlow 1.15, run operation by operation.

What counts in `meta.json`: `hyperparameters`. TensorFlow 1's square root on x86 is Eigen's: an approximate reciprocal
root, whose relative error is below 1.5 * 2^-12, and one Newton step, which leaves 1.5 (1.5 * 2^-12)^2 = 3.4 u and whose
five operations round by 4 u together (docs/bounds.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statekit.schema import load_schema
from statekit.verify.systems.aliased import described, kind

KINDS = {
    "gpt-neo optimizers.AdamWeightDecayOptimizer": ("adamw", "gpt_neo"),
    "AdamWeightDecayOptimizer": ("adamw", "mesh_tf"),
}
SQRT_UNITS = 8.0
"""Source: Eigen, Eigen/src/Core/arch/AVX/MathFunctions.h, `psqrt<Packet8f>` with EIGEN_FAST_MATH, of 2019."""


def describe(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `recording.json` for Mesh-TensorFlow's `meta.json`."""
    schema, variant = kind(meta, KINDS)
    arguments = {
        # get_optimizer passes these itself, whatever the run's configuration says.
        "exclude_from_weight_decay": load_schema(schema).settings(variant)["exclude_from_weight_decay"],
        **meta["hyperparameters"],
    }
    group = {**arguments, "params": meta["extra"]["param_order"]}
    told = {"schema": schema, "variant": variant, "groups": [group]}
    prefix = meta["checkpoint"]["prefix"]
    return described(meta, [(1, int(meta["steps"]), told)], prefix, "op_by_op", SQRT_UNITS)
