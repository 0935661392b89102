"""Recordings of Tensor2Tensor under TensorFlow 1.15, run operation by operation.

What counts in `meta.json`: `hyperparameters`; without a learning rate there the rule's own. The step is the training
loop's `global_step`, which may start above 0, at `extra.global_step_start`. Bfloat16 variables stand in the trajectory
as they are stored: with a `parameter_encoding`, encoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statekit.errors import NotFoundError
from statekit.verify.systems.schema_named import described, kind
from statekit.verify.systems.tensorflow1 import SQRT_UNITS, adafactor_arguments, own_rate

KINDS = {"AdafactorOptimizer": ("adafactor", "t2t")}
GENERATIONS = {"early": ((1, 5, 6), (1, 6, 0)), "late": ((1, 6, 3), (2, 0, 0))}
"""First release, and the first one after: those between the two change from one to the next."""


def describe(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `recording.json` for Tensor2Tensor's `meta.json`."""
    extra, arguments = meta["extra"], meta["hyperparameters"]
    schema, family = kind(meta, KINDS)
    spec = {
        "schema": schema,
        "variant": f"{family}_{_generation(meta['source'])}",
        "groups": [{**adafactor_arguments(arguments), "params": extra["param_order"]}],
    }
    return described(
        meta,
        [(1, int(meta["steps"]), spec)],
        meta["checkpoint"]["prefix"],
        "op_by_op",
        first=int(extra.get("global_step_start") or 0),
        own_rate=own_rate(arguments),
        sqrt_units=SQRT_UNITS,
    )


def _generation(source: str) -> str:
    release = re.search(r"tensor2tensor==(\d+)\.(\d+)\.(\d+)", source)
    version = tuple(map(int, release.groups())) if release else ()
    generation = next(
        (name for name, (first, after) in GENERATIONS.items() if first <= version < after), None
    )
    if generation is None:
        raise NotFoundError(
            "statekit doesn't know the rule of this release.",
            expected="tensor2tensor 1.5.6, 1.5.7, 1.6.3 or later",
            found=source,
        )
    return generation
