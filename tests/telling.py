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
    for answer in (_with_defaults, _with_optimizer, _with_values):
        try:
            return ask(hints)
        except UnknownRuleError as error:
            hints = answer(hints, str(error.expected))
    return ask(hints)


def _with_defaults(hints: CheckpointRef, expected: str) -> CheckpointRef:
    return replace(hints, assume_defaults=True)


def _with_optimizer(hints: CheckpointRef, expected: str) -> CheckpointRef:
    """Names the first of several optimizers, where that is asked."""
    names = expected.partition("one of ")[2]
    return replace(hints, optimizer=names.split(", ")[0]) if names else _with_values(hints, expected)


def _with_values(hints: CheckpointRef, expected: str) -> CheckpointRef:
    values = {name: _value(name) for name in expected.split(", ")}
    return replace(hints, hparams={**hints.hparams, **values})


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
