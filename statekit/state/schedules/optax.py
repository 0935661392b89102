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


def _constant(said: Mapping[str, Any], base: float | None) -> Told:
    return fault(said, ["value"]) or Rates((piece("constant", rate=said["value"]),))


def _polynomial(said: Mapping[str, Any], base: float | None) -> Told:
    names = ["init_value", _END, "power", "transition_steps", _BEGIN]
    if why := fault({"power": 1, **said}, names, [_BEGIN]):
        return why
    start, end, steps = said["init_value"], said[_END], said["transition_steps"]
    if steps <= 0:
        return Rates((piece("constant", rate=start),))
    moving = piece("linear", start=start, end=end, steps=steps)
    if (power := said.get("power", 1)) != 1:
        moving = piece("polynomial", start=start, end=end, steps=steps, power=power)
    return _begun(said[_BEGIN], start, moving)


def _begun(begins: int, rate: float, moving: Piece) -> Rates:
    """Returns a rate that stays until so many updates are done, and moves then."""
    return Rates((*([piece("constant", rate=rate)] if begins else []), moving.moved(begins)))


def _piecewise(said: Mapping[str, Any], base: float | None) -> Told:
    scales = said.get("boundaries_and_scales") or {}
    if why := fault(said, ["init_value"]):
        return why
    if not isinstance(scales, Mapping) or not all(
        is_count(at) and is_number(by) and by >= 0 for at, by in scales.items()
    ):
        return f"boundaries_and_scales is {scales!r:.80}"
    rate, pieces = said["init_value"], [piece("constant", rate=said["init_value"])]
    for at in sorted(scales):
        rate *= scales[at]
        pieces.append(piece("constant", at, at, rate=rate))
    return Rates(tuple(pieces))


def _exponential(said: Mapping[str, Any], base: float | None) -> Told:
    if why := fault(said, ["init_value", "transition_steps", "decay_rate", _BEGIN], [_BEGIN]):
        return why
    start, steps, factor = said["init_value"], said["transition_steps"], said["decay_rate"]
    floor = said.get(_END)
    if steps <= 0 or factor == 0:
        return Rates((piece("constant", rate=start),))
    if not (floor is None or (is_number(floor) and 0 < factor < 1)):
        return f"end_value is {floor!r:.80} where decay_rate is {factor!r}"
    ends = {} if floor is None else {"floor": floor}
    falling = piece(
        "step" if said.get("staircase") else "exponential", start=start, factor=factor, every=steps, **ends
    )
    return _begun(said[_BEGIN], falling.rate(0), falling)


def _cosine(said: Mapping[str, Any], base: float | None) -> Told:
    if why := fault(said, ["init_value", "decay_steps", "alpha", "exponent"]):
        return why
    start, steps, end = said["init_value"], said["decay_steps"], said["init_value"] * said["alpha"]
    if said["exponent"] != 1 or steps <= 0:
        return (
            "its exponent isn't 1, which no other schedule has" if steps > 0 else "it decays for no updates"
        )
    falling = piece("cosine", start=start, end=end, steps=steps)
    return Rates((falling, piece("constant", math.ceil(steps), math.ceil(steps), rate=end)))


def _warmed_up(said: Mapping[str, Any], after: Told) -> Told:
    """Returns a schedule that begins when a linear warm-up is over."""
    if isinstance(after, str):
        return after
    warm = said["warmup_steps"]
    first = piece("linear", start=said["init_value"], end=said["peak_value"], steps=warm)
    return Rates((*([first] if warm else []), *(one.moved(warm) for one in after.pieces)))


_WARM = ["init_value", "peak_value", "warmup_steps"]


def _warmup_constant(said: Mapping[str, Any], base: float | None) -> Told:
    if why := fault(said, _WARM, ["warmup_steps"]):
        return why
    rate = said["peak_value"] if said["warmup_steps"] else said["init_value"]
    return _warmed_up(said, Rates((piece("constant", rate=rate),)))


def _warmup_cosine(said: Mapping[str, Any], base: float | None) -> Told:
    if why := fault(said, [*_WARM, "decay_steps", _END], ["warmup_steps"]):
        return why
    peak, warm = said["peak_value"], said["warmup_steps"]
    alpha = 0.0 if peak == 0 else said[_END] / peak
    falling = {"init_value": peak, "decay_steps": said["decay_steps"] - warm, "alpha": alpha}
    return _warmed_up(said, _cosine({**falling, "exponent": said["exponent"]}, base))


def _warmup_exponential(said: Mapping[str, Any], base: float | None) -> Told:
    if why := fault(said, _WARM, ["warmup_steps"]):
        return why
    return _warmed_up(said, _exponential({**said, "init_value": said["peak_value"]}, base))


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
