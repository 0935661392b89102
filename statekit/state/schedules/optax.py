"""Optax' schedules, by the calls that make them: its states count, and hold no function.

Source: google-deepmind/optax optax/schedules/_schedule.py, _join.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from statekit.state.rates import Piece, Rates, Told, piece
from statekit.state.schedules.function import Function, fault, is_count, is_number

_BEGIN, _END = "transition_begin", "end_value"


def _constant(arguments: Mapping[str, Any], base: float | None) -> Told:
    return fault(arguments, ["value"]) or Rates((piece("constant", rate=arguments["value"]),))


def _polynomial(arguments: Mapping[str, Any], base: float | None) -> Told:
    names = ["init_value", _END, "power", "transition_steps", _BEGIN]
    if why := fault({"power": 1, **arguments}, names, [_BEGIN]):
        return why
    start, end, steps = arguments["init_value"], arguments[_END], arguments["transition_steps"]
    if steps <= 0:
        return Rates((piece("constant", rate=start),))
    moving = piece("linear", start=start, end=end, steps=steps)
    if (power := arguments.get("power", 1)) != 1:
        moving = piece("polynomial", start=start, end=end, steps=steps, power=power)
    return _begun(arguments[_BEGIN], start, moving)


def _begun(begins: int, rate: float, moving: Piece) -> Rates:
    """Returns a rate that stays until so many updates are done, and moves then."""
    return Rates((*([piece("constant", rate=rate)] if begins else []), moving.moved(begins)))


def _piecewise(arguments: Mapping[str, Any], base: float | None) -> Told:
    scales = arguments.get("boundaries_and_scales") or {}
    if why := fault(arguments, ["init_value"]):
        return why
    if not isinstance(scales, Mapping) or not all(
        is_count(at) and is_number(by) and by >= 0 for at, by in scales.items()
    ):
        return f"boundaries_and_scales is {scales!r:.80}"
    rate, pieces = arguments["init_value"], [piece("constant", rate=arguments["init_value"])]
    for at in sorted(scales):
        rate *= scales[at]
        pieces.append(piece("constant", at, at, rate=rate))
    return Rates(tuple(pieces))


def _exponential(arguments: Mapping[str, Any], base: float | None) -> Told:
    if why := fault(arguments, ["init_value", "transition_steps", "decay_rate", _BEGIN], [_BEGIN]):
        return why
    start, steps, factor = arguments["init_value"], arguments["transition_steps"], arguments["decay_rate"]
    floor = arguments.get(_END)
    if steps <= 0 or factor == 0:
        return Rates((piece("constant", rate=start),))
    if not (floor is None or (is_number(floor) and 0 < factor < 1)):
        return f"end_value is {floor!r:.80} where decay_rate is {factor!r}"
    ends = {} if floor is None else {"floor": floor}
    falling = piece(
        "step" if arguments.get("staircase") else "exponential",
        start=start,
        factor=factor,
        every=steps,
        **ends,
    )
    return _begun(arguments[_BEGIN], falling.rate(0), falling)


def _cosine(arguments: Mapping[str, Any], base: float | None) -> Told:
    if why := fault(arguments, ["init_value", "decay_steps", "alpha", "exponent"]):
        return why
    start = arguments["init_value"]
    steps = arguments["decay_steps"]
    end = arguments["init_value"] * arguments["alpha"]
    if arguments["exponent"] != 1 or steps <= 0:
        return (
            "its exponent isn't 1, which no other schedule has" if steps > 0 else "it decays for no updates"
        )
    falling = piece("cosine", start=start, end=end, steps=steps)
    return Rates((falling, piece("constant", math.ceil(steps), math.ceil(steps), rate=end)))


def _warmed_up(arguments: Mapping[str, Any], after: Told) -> Told:
    """Returns a schedule that begins when a linear warm-up is over."""
    if isinstance(after, str):
        return after
    warm = arguments["warmup_steps"]
    first = piece("linear", start=arguments["init_value"], end=arguments["peak_value"], steps=warm)
    return Rates((*([first] if warm else []), *(part.moved(warm) for part in after.pieces)))


_WARM = ["init_value", "peak_value", "warmup_steps"]


def _warmup_constant(arguments: Mapping[str, Any], base: float | None) -> Told:
    if why := fault(arguments, _WARM, ["warmup_steps"]):
        return why
    rate = arguments["peak_value"] if arguments["warmup_steps"] else arguments["init_value"]
    return _warmed_up(arguments, Rates((piece("constant", rate=rate),)))


def _warmup_cosine(arguments: Mapping[str, Any], base: float | None) -> Told:
    if why := fault(arguments, [*_WARM, "decay_steps", _END], ["warmup_steps"]):
        return why
    peak, warm = arguments["peak_value"], arguments["warmup_steps"]
    alpha = 0.0 if peak == 0 else arguments[_END] / peak
    falling = {"init_value": peak, "decay_steps": arguments["decay_steps"] - warm, "alpha": alpha}
    return _warmed_up(arguments, _cosine({**falling, "exponent": arguments["exponent"]}, base))


def _warmup_exponential(arguments: Mapping[str, Any], base: float | None) -> Told:
    if why := fault(arguments, _WARM, ["warmup_steps"]):
        return why
    return _warmed_up(arguments, _exponential({**arguments, "init_value": arguments["peak_value"]}, base))


FUNCTIONS: dict[str, Function] = {
    "constant_schedule": Function(("value",), _constant),
    "polynomial_schedule": Function(
        ("init_value", _END, "power", "transition_steps", _BEGIN), _polynomial, {_BEGIN: 0}
    ),
    "linear_schedule": Function(("init_value", _END, "transition_steps", _BEGIN), _polynomial, {_BEGIN: 0}),
    "piecewise_constant_schedule": Function(("init_value", "boundaries_and_scales"), _piecewise),
    "exponential_decay": Function(
        ("init_value", "transition_steps", "decay_rate", _BEGIN, "staircase", _END), _exponential, {_BEGIN: 0}
    ),
    "cosine_decay_schedule": Function(
        ("init_value", "decay_steps", "alpha", "exponent"), _cosine, {"alpha": 0.0, "exponent": 1.0}
    ),
    "warmup_constant_schedule": Function((*_WARM,), _warmup_constant),
    "warmup_cosine_decay_schedule": Function(
        (*_WARM, "decay_steps", _END, "exponent"), _warmup_cosine, {_END: 0.0, "exponent": 1.0}
    ),
    "warmup_exponential_decay_schedule": Function(
        (*_WARM, "transition_steps", "decay_rate", _BEGIN, "staircase", _END),
        _warmup_exponential,
        {_BEGIN: 0},
    ),
}
