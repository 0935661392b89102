"""Trust ratios of LAMB and LANS: the size of a parameter over the size of its direction, per tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from statekit.arrays.backend import Backend, Value


def _plain(xp: Backend, value: Value) -> Value:
    return xp.sqrt(xp.sum(value * value))


NORM: Mapping[str, Callable[[Backend, Value], Value]] = {
    "float32_sequential": _plain,
    "tree": lambda xp, value: xp.euclidean(value),
    "unspecified": _plain,
    "scaled": lambda xp, value: xp.norm(value),
}
"""The square root of the sum of squares: overflow and underflow are part of the rule, the order of a sum isn't."""


def _unless_zero(xp: Backend, top: Value, bottom: Value, otherwise: Value) -> Value:
    # Where a norm isn't above 0 it is 0 or NaN: adding it to the fallback changes nothing or keeps the NaN.
    inner = xp.if_greater(bottom, 0.0, top / bottom, otherwise + bottom)
    return xp.if_greater(top, 0.0, inner, otherwise + top)


def _if_positive(xp: Backend, top: Value, bottom: Value, otherwise: Value) -> Value:
    return xp.if_greater(top, 0.0, xp.if_greater(bottom, 0.0, top / bottom, otherwise), otherwise)


def _if_finite(xp: Backend, top: Value, bottom: Value, otherwise: Value) -> Value:
    ratio = top / bottom
    return xp.if_greater(ratio, 0.0, xp.if_greater(-ratio, -math.inf, ratio, otherwise), otherwise)


RATIO: Mapping[str, Callable[[Backend, Value, Value, Value], Value]] = {
    "zero_norm": _unless_zero,
    "undefined": _unless_zero,
    "not_positive": _if_positive,
    "zero_or_nan": _if_finite,
}
"""top / bottom, or a fallback, by `trust_ratio_fallback`."""
