"""Optimizer schemas: what each optimizer keeps, read from `schemas/*.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from statekit.errors import NotFoundError


@dataclass(frozen=True)
class SlotSchema:
    """One slot of an optimizer.

    Attributes:
        name: Canonical name, e.g. `v_row`.
        symbol: How papers write it.
        shape: Shape rule: `parameter`, `row` (parameter's axes minus COLUMN), `column` (minus ROW),
            `scalar_per_parameter` ((1,)*rank), `group`, ...
        dtype: `float32`, `parameter` or the name of a hyperparameter that says it.
        init: Initial value.
        recurrence: Its update, in plain mathematics.
        aliases: Implementation -> native name.
    """

    name: str
    symbol: str
    shape: str
    dtype: str
    init: float
    recurrence: str
    aliases: Mapping[str, str]


@dataclass(frozen=True)
class OptimizerSchema:
    """One optimizer: slots, hyperparameters, variants, step rule and sources, as `data` has them in full."""

    name: str
    slots: Mapping[str, SlotSchema]
    hyperparameters: Mapping[str, Mapping[str, Any]]
    variants: Mapping[str, Mapping[str, Any]]
    data: Mapping[str, Any]


def schema_names() -> list[str]:
    """Returns the names of all schemas."""
    files = resources.files("statekit.schemas").iterdir()
    return sorted(f.name[:-5] for f in files if f.name.endswith(".json") and not f.name.endswith(".schema.json"))


@cache
def load_schema(name: str) -> OptimizerSchema:
    """Reads one schema.

    Raises:
        NotFoundError: No schema of that name.
    """
    if name not in schema_names():
        raise NotFoundError("There is no such optimizer schema.", expected=", ".join(schema_names()), found=name)
    text = resources.files("statekit.schemas").joinpath(f"{name}.json").read_text(encoding="utf-8")
    data = json.loads(text)
    slots = {
        slot: SlotSchema(
            slot, s["symbol"], s["shape"], s["dtype"], float(s["init"]), s["recurrence"], s.get("aliases", {})
        )
        for slot, s in data["slots"].items()
    }
    return OptimizerSchema(name, slots, data["hyperparameters"], data["variants"], data)
