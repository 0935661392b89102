"""Recordings of Keras 3 on TensorFlow, run operation by operation.

What counts in `meta.json`, in this order: `extra.exclude_from_weight_decay` (no file of Keras has it), then
`hyperparameters`; where the learning rate is a schedule, its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statekit.verify.systems import muon
from statekit.verify.systems.schema_named import described, kind

KINDS = {"AdamW": ("adamw", "keras"), "Lamb": ("lamb", "keras"), "Adafactor": ("adafactor", "keras")}


def describe(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `recording.json` for Keras' `meta.json`."""
    if "Muon" in meta["optimizer"]:
        return muon.of_keras(meta)
    extra = meta["extra"]
    schema, variant = kind(meta, KINDS)
    group = {
        **meta["hyperparameters"],
        "exclude_from_weight_decay": extra["exclude_from_weight_decay"],
        "params": extra["param_order"],
    }
    spec = {"schema": schema, "variant": variant, "groups": [group]}
    file = next(name for name in meta["checkpoint"]["files"] if name.endswith(".keras"))
    return described(meta, [(1, int(meta["steps"]), spec)], file, "op_by_op")
