"""T5X's schedule: a product of factors that `create_learning_rate_scheduler` is told by name.

Source: google-research/t5x t5x/utils.py, `create_learning_rate_scheduler`, at cc342d4; t5x/trainer.py, which asks it
for the updates done before an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from statekit.state.rates import Piece, Rates, Told, piece, product
from statekit.state.schedules.function import Function, fault

_DEFAULTS: Mapping[str, Any] = {
    "factors": "constant * linear_warmup * rsqrt_decay",
    "base_learning_rate": 0.5,
    "warmup_steps": 1000,
    "decay_factor": 0.5,
    "steps_per_decay": 20000,
    "steps_per_cycle": 100000,
    "step_offset": 0,
    "min_learning_rate": 1e-8,
}
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "constant": ("base_learning_rate",),
    "linear_warmup": ("warmup_steps",),
    "linear_decay": ("base_learning_rate", "warmup_steps", "decay_factor"),
    "rsqrt_decay": ("warmup_steps",),
    "rsqrt_normalized_decay": ("warmup_steps",),
    "decay_every": ("decay_factor", "steps_per_decay"),
    "cosine_decay": ("warmup_steps", "steps_per_cycle"),
}
"""Factor -> the arguments that it reads."""
_DIVIDES = {
    "linear_warmup": "warmup_steps",
    "linear_decay": "warmup_steps",
    "rsqrt_decay": "warmup_steps",
    "rsqrt_normalized_decay": "warmup_steps",
    "decay_every": "steps_per_decay",
    "cosine_decay": "steps_per_cycle",
}
"""Factor -> the argument that it divides by."""
_COUNTS = ("warmup_steps", "steps_per_decay", "steps_per_cycle")
_LAST_STEP = 2**31 - 1
"""The largest step that T5X counts."""


def _read(arguments: Mapping[str, Any], base: float | None) -> Told:
    """Returns what T5X's scheduler gives for the updates done; no group has a rate of its own there."""
    factors = arguments.get("factors")
    if not isinstance(factors, str):
        return "missing factors" if factors is None else f"factors is {factors!r:.80}"
    names = [name.strip() for name in factors.split("*")]
    if unknown := [name for name in names if name not in _NEEDS]:
        return f"the factor {', '.join(map(repr, unknown))} isn't one of T5X's that is known here"
    needed = dict.fromkeys([*chain(*map(_NEEDS.__getitem__, names)), "step_offset", "min_learning_rate"])
    counts = [name for name in _COUNTS if name in needed]
    if why := fault(arguments, needed, counts, ["step_offset"]):
        return why
    if type(arguments["step_offset"]) is not int:
        return f"step_offset is {arguments['step_offset']!r:.80}"
    if why := _out_of_range(names, needed, arguments):
        return why
    rates = product(*(_FACTORS[name](arguments) for name in names))
    floored = [_floored(rates, number, arguments["min_learning_rate"]) for number in range(len(rates.pieces))]
    return Rates(tuple(_shifted(floored, arguments["step_offset"])))


def _out_of_range(names: Sequence[str], needed: Iterable[str], arguments: Mapping[str, Any]) -> str:
    """Returns why factors have no rates with such values; empty if they have."""
    negative = [
        name for name in needed if name not in ("step_offset", "min_learning_rate") and arguments[name] < 0
    ]
    falls_below = "linear_decay" in names and arguments["min_learning_rate"] < 0
    if negative or falls_below or names.count("linear_decay") > 1:
        return f"the product of its factors turns its sign: {', '.join(negative) or 'linear_decay falls below 0'}"
    divided = [(name, _DIVIDES[name]) for name in names if name in _DIVIDES]
    zeros = [f"{name} divides by {divisor}" for name, divisor in divided if arguments.get(divisor) == 0]
    return f"{', '.join(zeros)}, which is 0" if zeros else ""


def _from_warmup(arguments: Mapping[str, Any], before: Piece, after: Piece) -> Rates:
    """Returns a factor that is one thing up to the warm-up's end, and another from there on."""
    warm = arguments["warmup_steps"]
    return Rates((*([before] if warm else []), after.moved(warm)))


def _linear_decay(arguments: Mapping[str, Any]) -> Rates:
    base, slope = float(arguments["base_learning_rate"]), arguments["decay_factor"]
    rising = piece("linear", start=0.0, end=base, steps=arguments["warmup_steps"])
    falling = piece("linear", start=base, end=0.0, steps=1 / slope) if slope else piece("constant", rate=base)
    return _from_warmup(arguments, rising, falling)


def _rsqrt(arguments: Mapping[str, Any], start: float) -> Rates:
    falling = piece("rsqrt", start=start, shift=arguments["warmup_steps"])
    return _from_warmup(arguments, piece("constant", rate=start), falling)


def _cosine(arguments: Mapping[str, Any]) -> Rates:
    falling = piece("restarts", start=1.0, end=0.0, steps=arguments["steps_per_cycle"])
    return _from_warmup(arguments, piece("constant", rate=1.0), falling)


def _warmup(arguments: Mapping[str, Any]) -> Rates:
    rising = piece("linear", start=0.0, end=1.0, steps=arguments["warmup_steps"])
    return _from_warmup(arguments, rising, piece("constant", rate=1.0))


def _decay_every(arguments: Mapping[str, Any]) -> Rates:
    return Rates(
        (piece("step", start=1.0, factor=arguments["decay_factor"], every=arguments["steps_per_decay"]),)
    )


_FACTORS: Mapping[str, Callable[[Mapping[str, Any]], Rates]] = {
    "constant": lambda said: Rates((piece("constant", rate=float(said["base_learning_rate"])),)),
    "linear_warmup": _warmup,
    "linear_decay": _linear_decay,
    "rsqrt_decay": lambda said: _rsqrt(said, 1 / math.sqrt(said["warmup_steps"])),
    "rsqrt_normalized_decay": lambda said: _rsqrt(said, 1.0),
    "decay_every": _decay_every,
    "cosine_decay": _cosine,
}


def _floored(rates: Rates, number: int, floor: float) -> Piece:
    """Returns a piece that does not fall below the floor; a piece that never would stays as it is."""
    last = rates.pieces[number]
    if last.kind == "constant":
        return replace(last, numbers={"rate": max(last.numbers["rate"], floor)})
    ends = rates.pieces[number + 1].begins if number + 1 < len(rates.pieces) else _LAST_STEP
    falls_once = last.kind in ("linear", "rsqrt", "step")
    lowest = min(last.rate(last.begins), last.rate(ends)) if falls_once else 0.0
    return last if lowest >= floor else replace(last, numbers={**last.numbers, "floor": floor})


def _shifted(pieces: list[Piece], offset: int) -> list[Piece]:
    """Returns pieces as they are where T5X counts from a number of updates on: before it, nothing moves."""
    moved = [part.moved(offset) for part in pieces]
    if offset > 0 and pieces[0].kind != "constant":
        return [piece("constant", rate=pieces[0].rate(0)), *moved]
    first = max(sum(part.begins <= 0 for part in moved), 1) - 1
    return [replace(moved[first], begins=0), *moved[first + 1 :]]


FUNCTIONS: Mapping[str, Function] = {
    "create_learning_rate_scheduler": Function((*_DEFAULTS,), _read, _DEFAULTS)
}
