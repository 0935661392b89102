"""Tells a conversion what its target asks for, as a user would who knows the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.errors import UnknownRuleError
from statekit.state.schema import load_schema, schema_names

T = TypeVar("T")
RATE = 0.01


def once_asked(hints: CheckpointRef, ask: Callable[[CheckpointRef], T]) -> T:
    """Returns what a call gives, with documented defaults and what it still asks for then.

    Args:
        hints: What is known anyway.
        ask: The call.
    """
    try:
        return ask(hints)
    except UnknownRuleError:
        hints = replace(hints, assume_defaults=True)
    try:
        return ask(hints)
    except UnknownRuleError as error:
        missing = {name: _value(name) for name in str(error.expected).split(", ")}
        return ask(replace(hints, hparams={**hints.hparams, **missing}))


def _value(name: str) -> Any:
    """Returns a value that a hyperparameter may have: what most implementations have by default."""
    name = name.rpartition("/")[2]
    if name in ("learning_rate", "lr"):
        return RATE
    if name in ("clipvalue", "global_norm_clip_threshold"):
        return None  # most don't clip
    values = [
        variant["defaults"][name]
        for schema in map(load_schema, schema_names())
        for variant in schema.variants.values()
        if variant["defaults"].get(name) is not None
    ]
    return next(iter(values), None)
