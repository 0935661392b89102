"""Recordings of Mesh-TensorFlow and GPT-Neo under TensorFlow 1.15, run operation by operation.

What counts in `meta.json`: `hyperparameters`, for Adafactor with `extra.dimension_names` and `extra.variable_dtype`;
without a learning rate there the rule's own. A run whose variables are saved in less than they are updated in went on
from its own rounded save: the state before it is in `before_save.safetensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statekit.state.schema import load_schema
from statekit.verify.systems.schema_named import described, kind
from statekit.verify.systems.tensorflow1 import SQRT_UNITS, adafactor_arguments, own_rate

KINDS = {
    "gpt-neo optimizers.AdamWeightDecayOptimizer": ("adamw", "gpt_neo"),
    "AdamWeightDecayOptimizer": ("adamw", "mesh_tf"),
    "AdafactorOptimizer": ("adafactor", "mesh_tf"),
}
BEFORE_SAVE = "before_save.safetensors"


def describe(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `recording.json` for Mesh-TensorFlow's `meta.json`."""
    schema, variant = kind(meta, KINDS)
    extra, arguments = meta["extra"], dict(meta["hyperparameters"])
    dtypes = extra["variable_dtype"]
    if schema == "adafactor":
        offset = load_schema(schema).settings(variant)["step_offset"]
        arguments = {"step_offset": offset, **adafactor_arguments(arguments)}
        arguments["activation_dtype"] = dtypes["activation"]
    else:
        # get_optimizer passes these itself, whatever the run's configuration says.
        excluded = load_schema(schema).settings(variant)["exclude_from_weight_decay"]
        arguments = {"exclude_from_weight_decay": excluded, **arguments}
    spec = {
        "schema": schema,
        "variant": variant,
        "groups": [{**arguments, "params": extra["param_order"]}],
        "dimension_names": extra["dimension_names"],
    }
    resumed = {"step": int(meta["checkpoint_step"]), "before": BEFORE_SAVE, "dtype": dtypes["master"]}
    return described(
        meta,
        [(1, int(meta["steps"]), spec)],
        meta["checkpoint"]["prefix"],
        "op_by_op",
        own_rate=schema == "adafactor" and own_rate(arguments),
        sqrt_units=SQRT_UNITS,
        resumed=resumed if (folder / BEFORE_SAVE).is_file() else None,
    )
