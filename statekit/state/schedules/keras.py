"""Keras' schedules, by the calls that make them, as a model's config has them too.

They are asked for the optimizer's `iterations`: the calls so far, which are updates unless it accumulates gradients.
Source: keras-team/keras keras/src/optimizers/schedules/learning_rate_schedule.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from statekit.state.rates import Rates, Told, piece
from statekit.state.schedules.function import Function, fault, is_count, is_number

_START, _STEPS = "initial_learning_rate", "decay_steps"
_WARMED = ("warmup_target", "warmup_steps")


def _exponential(arguments: Mapping[str, Any], base: float | None) -> Told:
    if why := fault(arguments, [_START, _STEPS, "decay_rate"]) or _no_steps(arguments):
        return why
    numbers = {"start": arguments[_START], "factor": arguments["decay_rate"], "every": arguments[_STEPS]}
    return Rates((piece("step" if arguments.get("staircase") else "exponential", **numbers),))


def _inverse(arguments: Mapping[str, Any], base: float | None) -> Told:
    if why := fault(arguments, [_START, _STEPS, "decay_rate"]) or _no_steps(arguments):
        return why
    if arguments["decay_rate"] < 0:
        return f"decay_rate is {arguments['decay_rate']!r}"
    numbers = {"start": arguments[_START], "factor": arguments["decay_rate"], "every": arguments[_STEPS]}
    return Rates((piece("inverse", **numbers, stairs=bool(arguments.get("staircase"))),))


def _polynomial(arguments: Mapping[str, Any], base: float | None) -> Told:
    if why := fault(arguments, [_START, _STEPS, "end_learning_rate", "power"]) or _no_steps(arguments):
        return why
    if arguments.get("cycle"):
        return "it begins anew, in cycles that no other schedule has"
    numbers = {"start": arguments[_START], "end": arguments["end_learning_rate"], "steps": arguments[_STEPS]}
    if arguments["power"] == 1:
        return Rates((piece("linear", **numbers),))
    return Rates((piece("polynomial", **numbers, power=arguments["power"]),))


def _cosine(arguments: Mapping[str, Any], base: float | None) -> Told:
    if arguments.get("warmup_target") is None:
        arguments = {**arguments, "warmup_steps": 0, "warmup_target": arguments.get(_START)}
    if why := fault(arguments, [_START, _STEPS, "alpha", *_WARMED], ["warmup_steps"]) or _no_steps(arguments):
        return why
    peak, warm = (arguments[name] for name in _WARMED)
    ends = warm + math.ceil(arguments[_STEPS])
    return Rates(
        (
            *([piece("linear", start=arguments[_START], end=peak, steps=warm)] if warm else []),
            piece("cosine", warm, warm, start=peak, end=peak * arguments["alpha"], steps=arguments[_STEPS]),
            piece("constant", ends, ends, rate=peak * arguments["alpha"]),
        )
    )


def _piecewise(arguments: Mapping[str, Any], base: float | None) -> Told:
    bounds, values = arguments.get("boundaries"), arguments.get("values")
    if not isinstance(bounds, list) or not isinstance(values, list) or len(values) != len(bounds) + 1:
        return "boundaries and values don't go together"
    if not all(map(is_count, bounds)) or sorted(bounds) != bounds or not all(map(is_number, values)):
        return f"boundaries are {bounds!r:.80}, values {values!r:.80}"
    # A boundary is the last call at the value before it.
    begins = [0, *(at + 1 for at in bounds)]
    return Rates(tuple(piece("constant", at, at, rate=rate) for at, rate in zip(begins, values, strict=True)))


def _no_steps(arguments: Mapping[str, Any]) -> str | None:
    """Returns why a schedule of these arguments isn't the usual one; None if it is.

    Source: keras-team/keras, keras/src/optimizers/schedules/learning_rate_schedule.py: all numbers are cast to the
    dtype of `initial_learning_rate`.
    """
    if isinstance(arguments[_START], int):
        return f"{_START} is the whole number {arguments[_START]}: Keras then casts all its numbers to whole ones"
    return None if arguments[_STEPS] > 0 else f"{_STEPS} is {arguments[_STEPS]!r}"


FUNCTIONS: dict[str, Function] = {
    "ExponentialDecay": Function(
        (_START, _STEPS, "decay_rate", "staircase", "name"), _exponential, {"staircase": False}, ("name",)
    ),
    "InverseTimeDecay": Function(
        (_START, _STEPS, "decay_rate", "staircase", "name"), _inverse, {"staircase": False}, ("name",)
    ),
    "PolynomialDecay": Function(
        (_START, _STEPS, "end_learning_rate", "power", "cycle", "name"),
        _polynomial,
        {"end_learning_rate": 0.0001, "power": 1.0, "cycle": False},
        ("name",),
    ),
    "CosineDecay": Function(
        (_START, _STEPS, "alpha", "name", "warmup_target", "warmup_steps"),
        _cosine,
        {"alpha": 0.0, "warmup_target": None, "warmup_steps": 0},
        ("name",),
    ),
    "PiecewiseConstantDecay": Function(("boundaries", "values", "name"), _piecewise, beside=("name",)),
}
