"""Adam's moments and their correction, in the forms in which LANS, LAMB and AdamW compute them.

    m = beta1 m + (1-beta1) g,  v = beta2 v + (1-beta2) g^2,  c = 1 - beta^t at the t-th update

Source: Kingma and Ba 2014, arXiv 1412.6980, algorithm 1; the forms are those of `schemas/{lans,lamb,adamw}.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from statekit.arrays.backend import Backend, Value


@dataclass(frozen=True)
class Decay:
    """The weights of a moment's old and new value, in the original's precision; None for an exact one."""

    old: Value
    new: Value


def decay(xp: Backend, beta: float, rounded_to: str = "float32") -> Decay:
    """Returns beta and 1 - beta, the difference taken in float64; `rounded_to` is what beta is rounded to."""
    return Decay(xp.constant(beta, rounded_to), xp.constant(1.0 - beta))


def decay_float32(xp: Backend, beta: float) -> Decay:
    """Returns beta and 1 - beta, the difference taken in float32: for 0.999 it is off by 1.3e-5."""
    return Decay(xp.constant(beta), xp.constant(1.0 - xp.constant(beta)))


Blend = Callable[[Backend, Value, Value, Decay], Value]


def weighted_product(decayed: Value, g: Value, d: Decay) -> Value:
    """Returns the second moment, its old value decayed, after an update with gradient g."""
    return decayed + (d.new * g) * g


def _in_float32(xp: Backend, d: Decay) -> Decay:
    """Returns the weights of a kernel whose betas are float32: it takes 1 - beta in float32 too."""
    return Decay(d.old, xp.constant(1.0 - d.old))


FIRST: Mapping[str, Blend] = {
    "weighted_sum": lambda xp, m, g, d: d.old * m + d.new * g,
    "weighted_sum_float32": lambda xp, m, g, d: d.old * m + _in_float32(xp, d).new * g,
    "lerp": lambda xp, m, g, d: xp.lerp(m, g, xp.widen(d.new)),
    "difference": lambda xp, m, g, d: m + (g - m) * d.new,
}
"""The first moment after an update with gradient g."""

SECOND: Mapping[str, Blend] = {
    "weighted_sum": lambda xp, v, g, d: d.old * v + d.new * (g * g),
    "weighted_product": lambda xp, v, g, d: weighted_product(d.old * v, g, d),
    "weighted_product_float32": lambda xp, v, g, d: weighted_product(d.old * v, g, _in_float32(xp, d)),
    "difference": lambda xp, v, g, d: v + (g * g - v) * d.new,
    "unspecified": lambda xp, v, g, d: d.old * v + d.new * (g * g),
}
"""The second moment after an update with gradient g."""


def _by_power(xp: Backend, beta: float, t: Value) -> Value:
    return 1.0 - xp.exponential(xp.constant(beta), xp.widen(t))


def _exact(xp: Backend, beta: float, t: Value) -> Value:
    off = isinstance(beta, (int, float)) and not beta  # an array can't be asked
    return xp.number(1.0) if off else xp.one_minus_power(beta, t)


CORRECTION: Mapping[str, Callable[[Backend, float, Value], Value]] = {
    "float64": _exact,
    "float64_rounded": _exact,
    "float64_on_float32": lambda xp, beta, t: _exact(xp, xp.constant(beta), t),
    "float32": _by_power,
    "parameter": _by_power,
    "unspecified": _exact,
}
"""1 - beta^t at update t, by the precision in which the original takes it."""

RATE: Mapping[str, Callable[[Backend, Value], Value]] = {
    "float64": lambda xp, rate: xp.number(rate),
    "float32": lambda xp, rate: xp.widen(rate),
    "update": lambda xp, rate: xp.literal(rate),
    "parameter": lambda xp, rate: xp.widen(rate),
    "unspecified": lambda xp, rate: xp.number(rate),
}
"""The learning rate as the original holds it before it meets the parameters."""


def second_moment(xp: Backend, kind: str, v: Value, g: Value, squares: Value | None, d: Decay) -> Value:
    """Returns the second moment after an update with gradient g, `squares` in place of its square if they are given."""
    if squares is None:
        return SECOND[kind](xp, v, g, d)
    return FIRST["difference" if kind == "difference" else "weighted_sum"](xp, v, xp.widen(squares), d)


def slots_like(xp: Backend, param: Value, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns zeros of a parameter's shape: name -> dtype."""
    return {name: xp.zeros(param, xp.shape(param), dtype) for name, dtype in names.items()}
