"""Recordings of Hugging Face's Adafactor, alone or under Trainer; slots born in the first update.

What counts in `meta.json`: `extra.param_groups`; `learning_rate` per step and group, unless `relative_step` lets the
rule compute its own. Its slot RMS is a note on the parameter before the last update: written and never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statekit.verify.systems.schema_named import checkpoint_of, described, kind
from statekit.verify.systems.torch_optim import recorded_groups

KINDS = {"Adafactor": ("adafactor", "hf")}


def describe(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `recording.json` for a `meta.json` of Transformers."""
    schema, variant = kind(meta, KINDS)
    groups = list(recorded_groups(folder, meta))
    spec = {
        "schema": schema,
        "variant": variant,
        "groups": groups,
        "counts": {"slots": ["step"], "dtype": "int64"},
    }
    own_rate = all(group["relative_step"] for group in groups)
    path = checkpoint_of(meta["checkpoint"]["files"])
    return described(meta, [(1, int(meta["steps"]), spec)], path, "compiled", own_rate=own_rate)
