"""A float64 interval for every element that float32 arithmetic could return: the derived bound of a step.

`IntervalBackend` runs the same text as every other backend, but a value is the pair of the smallest and the largest
float64 that an implementation in the declared arithmetic can reach.

What is declared, per operation (u = 2^-24):

 - `+ - * / sqrt` are correctly rounded in float32. Endpoints are computed in float64 and rounded to float32, which is
   exact (double rounding is innocuous: 53 >= 2*24 + 2 bits; Figueroa 1995). Rounding is monotone, so the rounded
   endpoints enclose every rounded result. Where an implementation compiles (`contracted`), a product may stay unrounded
   (fused multiply-add) and a division may be a product with a reciprocal: endpoints are widened by 2u instead.
 - `power` is no IEEE operation: 4 units in the last place, the most that a common libm declares for `powf`
   (CUDA C++ Programming Guide, appendix on mathematical functions; glibc, SLEEF and XLA on CPUs stay below). A power
   of 1 is exactly 1 (C17, F.10.4.4), unless it may be computed as a reciprocal root; so is what has the exponent 0.
 - a sum of n terms may run in any order: its error is at most gamma * sum|x|,
   gamma = min((n-1) u, 6 sqrt(n-1) u) / (1 - n u).
   The first is Higham, Accuracy and Stability, section 4.2; the second holds with probability above 1 - 2 exp(-18)
   for rounding errors of mean zero (Higham and Mary 2019, theorem 2.4).
 - a result below the normal range may be flushed to zero, and where an implementation compiles, a stored value there
   may be taken for zero, as XLA does; a rounding there is at most half of 2^-149, at any size.
 - `narrow` and `rounded` round to nearest even, so both neighbours are admitted at a tie and only there.

docs/bounds.md has the derivation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from statekit.arrays.backend import Backend, Value
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.tensors.tensor import DTYPES, Array, float_info

UNIT = 2.0**-24
"""Rounding unit of float32."""
POWER_ULPS = 4
DECAY_UNITS = 2 * POWER_ULPS + 2
"""Relative error of 1 - b^n, in units: -expm1(n log b) rounds log b and the product, then `expm1` itself."""
RECIPROCAL_ROOT = -0.5
"""The exponent for which a power may run as the reciprocal of a root, or as a processor's approximation of it."""
CONFIDENCE = 6.0
"""Standard deviations in the probabilistic bound of a sum."""
TINY = float(np.finfo(np.float32).tiny)
"""The least normal number of float32."""
LOW_STEP, LOW_NUMBERS, MOST_POINTS = 2.0**-10, 9, 64
"""Relative width from which an interval is one of two roundings to low precision, and how many arrays are tried."""
LEAST = float(np.finfo(np.float32).smallest_subnormal)


def gamma(terms: int) -> float:
    """Returns the relative error bound of a float32 sum of `terms` numbers, in any order."""
    steps = max(terms - 1, 0)
    return min(steps, CONFIDENCE * math.sqrt(steps)) * UNIT / (1 - min(terms * UNIT, 0.5))


def scaled_norm_error(sizes: Array) -> float:
    """Returns the relative error bound of a float32 norm of elements of these sizes that scales on the way.

    Squares are taken of x / s and summed, s being the largest size, or the largest so far: then the sum is multiplied
    by (s / s')^2 whenever s rises to s' (MXNet's `nrm2`; LAPACK's `slassq`). Roundings: 3 in each square, 4 for each
    rise, n - 1 in the sum; half of all that in its root, and 2 for root and last product.
    """
    rises = int(np.sum(np.diff(np.maximum.accumulate(sizes), prepend=0.0) > 0)) if sizes.size else 0
    return gamma(sizes.size) / 2 + (3 + 4 * rises) * UNIT / 2 + 2 * UNIT


@dataclass(frozen=True, eq=False)
class Interval:
    """Every value that lies between `low` and `high` (float64 arrays of one shape); NaN where the value is NaN.

    `dtype` is that of the stored value; `contracted` says that the arithmetic may be compiled.
    """

    low: Array
    high: Array
    dtype: str = "float32"
    contracted: bool = False

    __array_ufunc__ = None

    def encloses(self, values: Array) -> Array:
        """Tells of each of some values whether it lies in its interval; where that is NaN, whether it is NaN too."""
        absent = np.isnan(self.low) | np.isnan(self.high)
        return np.where(absent, np.isnan(values), (values >= self.low) & (values <= self.high))

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low, self.dtype, self.contracted)

    def __add__(self, other: Any) -> Interval:
        o = self._other(other)
        return self._round(self.low + o.low, self.high + o.high)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Interval:
        o = self._other(other)
        return self._round(self.low - o.high, self.high - o.low)

    def __rsub__(self, other: Any) -> Interval:
        return self._other(other) - self

    def __mul__(self, other: Any) -> Interval:
        o = self._other(other)
        corners = [self.low * o.low, self.low * o.high, self.high * o.low, self.high * o.high]
        low, high = np.minimum.reduce(corners), np.maximum.reduce(corners)
        if o is self:  # a square: its corners would reach below zero
            low = np.where((self.low < 0) & (self.high > 0), 0.0, np.minimum(corners[0], corners[3]))
            low = np.where(np.isnan(high), high, low)
        return self._round(low, high)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Interval:
        o = self._other(other)
        corners = [self.low / o.low, self.low / o.high, self.high / o.low, self.high / o.high]
        quotient = self._round(np.minimum.reduce(corners), np.maximum.reduce(corners), 2)
        if other is o or self.contracted:
            return quotient
        product = self * float(np.float32(1) / np.float32(other))
        return Interval(np.minimum(quotient.low, product.low), np.maximum(quotient.high, product.high))

    def __rtruediv__(self, other: Any) -> Interval:
        return self._other(other) / self

    def _other(self, other: Any) -> Interval:
        if isinstance(other, Interval):
            return other
        point = np.asarray(float(np.float32(other)), np.float64)
        return Interval(point, point, "float32", self.contracted)

    def _round(self, low: Array, high: Array, units: int = 1) -> Interval:
        if self.contracted:
            return self.widened(low, high, units * UNIT)
        return Interval(
            *_flushed(low.astype(np.float32).astype(np.float64), high.astype(np.float32).astype(np.float64))
        )

    def widened(self, low: Array, high: Array, relative: float | Array) -> Interval:
        """Returns the interval [low, high] widened by a relative error, and overflowed where float32 would.

        Below the normal range numbers are multiples of one unit, and what isn't flushed is rounded to these.
        """
        low = np.where(np.isinf(low), low, low - np.abs(low) * relative)
        high = np.where(np.isinf(high), high, high + np.abs(high) * relative)
        low = np.where((low < 0) & (low > -TINY), low - LEAST, low)
        high = np.where((high > 0) & (high < TINY), high + LEAST, high)
        limit = float(np.finfo(np.float32).max) * (1 + UNIT)
        low = np.where(np.abs(low) > limit, np.copysign(np.inf, low), low)
        high = np.where(np.abs(high) > limit, np.copysign(np.inf, high), high)
        return Interval(*_flushed(low, high), "float32", self.contracted)


def _flushed(low: Array, high: Array) -> tuple[Array, Array]:
    return np.where((low > 0) & (low < TINY), 0.0, low), np.where((high < 0) & (high > -TINY), 0.0, high)


def _points(value: Interval) -> list[Array]:
    """Returns float32 arrays that lie in an interval: its middle, with what may stand where low precision rounded.

    Such an element has an interval of some steps of low precision: each number of it that lies there may stand for
    it. The elements' choices multiply; beyond 64 arrays some are drawn.
    """
    middle = (value.low + value.high) / 2
    apart = np.flatnonzero(value.high - value.low > LOW_STEP * np.abs(middle))
    between = np.linspace(np.ravel(value.low)[apart], np.ravel(value.high)[apart], LOW_NUMBERS)
    options = [np.unique(column) for column in between.astype(DTYPES["bfloat16"]).astype(np.float64).T]
    random = np.random.default_rng(0)
    few = math.prod(map(len, options)) <= MOST_POINTS
    choices = (
        itertools.product(*options) if few else (map(random.choice, options) for _ in range(MOST_POINTS))
    )
    points = []
    for choice in choices:
        point = np.ravel(middle).copy()
        point[apart] = list(choice)
        points.append(point.reshape(middle.shape).astype(np.float32))
    return points


@dataclass(frozen=True)
class IntervalBackend(Backend):
    """Runs a step's text over intervals. Source of the method: Moore, Interval Analysis, 1966.

    `sqrt_units` is how far a square root may be from the exact one, in units of 2^-24, if it isn't correctly rounded.
    """

    contracted: bool = False
    name: str = "interval"
    sqrt_units: float = 0.0

    @property
    def contracts(self) -> bool:
        return self.contracted

    def asarray(self, array: Array) -> Value:
        exact = np.asarray(array).astype(np.float64)
        if array.dtype != np.float64:
            low, high = _flushed(exact, exact) if self.contracted else (exact, exact)
            return Interval(low, high, array.dtype.name, self.contracted)
        single = exact.astype(np.float32).astype(np.float64)  # JAX has no float64 unless asked for
        return Interval(np.minimum(exact, single), np.maximum(exact, single), "float64", self.contracted)

    def numpy(self, value: Value) -> Array:
        return np.asarray((value.low + value.high) / 2)

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with np.errstate(all="ignore"):
                return step(*args)

        return run

    def widen(self, value: Value) -> Value:
        if isinstance(value, Interval):
            return Interval(value.low, value.high, "float32", self.contracted)
        point = np.asarray(np.float32(value), np.float64)
        return Interval(point, point, "float32", self.contracted)

    def narrow(self, value: Value, dtype: str) -> Value:
        kind = DTYPES[dtype]
        if kind.kind in "iu":  # counts are whole numbers, and exact in float32
            return Interval(np.rint(value.low), np.rint(value.high), dtype, self.contracted)
        low, high = value.low.astype(kind).astype(np.float64), value.high.astype(kind).astype(np.float64)
        return Interval(low, high, dtype, self.contracted)

    def rounded(self, value: Value, dtype: str) -> Value:
        # To float32 nothing is rounded that an operation didn't round: a contracted product stays as it is.
        return value if dtype == "float32" else self.widen(self.narrow(value, dtype))

    def about(self, value: Value, dtype: str) -> Value | None:
        info = float_info(DTYPES[dtype])
        unit, least = float(info.eps) / 2, float(info.smallest_subnormal) / 2
        # Rounding keeps the sign, and 0.
        down, up = (np.abs(end) * unit + least for end in (value.low, value.high))
        low = np.where(value.low >= 0, np.maximum(value.low - down, 0.0), value.low - down)
        high = np.where(value.high <= 0, np.minimum(value.high + up, 0.0), value.high + up)
        low, high = np.where(value.low == 0, 0.0, low), np.where(value.high == 0, 0.0, high)
        kept = self.rounded(value, dtype)
        # What overflows, or isn't a number, stays that.
        finite = np.isfinite(kept.low) & np.isfinite(kept.high)
        return self.widen(Interval(np.where(finite, low, kept.low), np.where(finite, high, kept.high)))

    def number(self, value: Value) -> Value:
        if isinstance(value, Interval):
            return value
        # On the host it may be float64, in a compiled step float32; what is computed from it alike.
        ends = float(value), float(np.float32(value))
        return Interval(np.asarray(min(ends)), np.asarray(max(ends)), "float32", True)

    def shape(self, value: Value) -> tuple[int, ...]:
        return tuple(value.low.shape)

    def dtype(self, value: Value) -> str:
        return str(value.dtype)

    def zeros(self, like: Value, shape: tuple[int, ...], dtype: str) -> Value:
        return Interval(np.zeros(shape), np.zeros(shape), dtype, self.contracted)

    def sum(self, *values: Value) -> Value:
        flat = Interval(
            np.concatenate([np.ravel(value.low) for value in values]),
            np.concatenate([np.ravel(value.high) for value in values]),
            "float32",
            self.contracted,
        )
        return self._total(flat, (0,), False)

    def norm(self, value: Value) -> Value:
        size = self.absolute(value)
        low, high = (np.asarray(np.sqrt(np.sum(np.square(end)))) for end in (size.low, size.high))
        return size.widened(low, high, scaled_norm_error(np.ravel(size.high)))

    def mean(self, value: Value, axes: tuple[int, ...], keepdims: bool = False) -> Value:
        if not axes:
            return value
        count = math.prod(value.low.shape[axis] for axis in axes)
        total = self._total(value, axes, keepdims)
        # XLA divides by a constant as a product with its reciprocal: two roundings.
        with np.errstate(all="ignore"):
            return total.widened(total.low / np.float64(count), total.high / np.float64(count), 2 * UNIT)

    def expand(self, value: Value, axes: tuple[int, ...]) -> Value:
        return Interval(
            np.expand_dims(value.low, axes), np.expand_dims(value.high, axes), value.dtype, self.contracted
        )

    def emulated(self, function: Callable[[Backend, Value], Value], value: Value, within: float) -> Value:
        results = [np.asarray(function(NumpyBackend(), point)).astype(np.float64) for point in _points(value)]
        low, high = np.minimum.reduce(results), np.maximum.reduce(results)
        reach = within * max(np.max(np.abs(low), initial=0.0), np.max(np.abs(high), initial=0.0))
        return self.widen(Interval(low - reach, high + reach))

    def sqrt(self, value: Value) -> Value:
        ends = np.sqrt(value.low), np.sqrt(value.high)
        if self.sqrt_units:
            return value.widened(*ends, max(self.sqrt_units, 2) * UNIT)
        return value._round(*ends, 2)

    def power(self, value: Value, exponent: float) -> Value:
        ends = np.power(value.low, np.float64(exponent)), np.power(value.high, np.float64(exponent))
        error = np.full(value.low.shape, 2 * POWER_ULPS * UNIT)
        if exponent != RECIPROCAL_ROOT:
            error[(value.low == 1) & (value.high == 1)] = 0.0
        return value.widened(np.minimum(*ends), np.maximum(*ends), error)

    def maximum(self, left: Value, right: Value) -> Value:
        other = left._other(right)
        return self.widen(Interval(np.maximum(left.low, other.low), np.maximum(left.high, other.high)))

    def minimum(self, left: Value, right: Value) -> Value:
        other = left._other(right)
        return self.widen(Interval(np.minimum(left.low, other.low), np.minimum(left.high, other.high)))

    def keep_nan(self, new: Value, old: Value) -> Value:
        absent = np.isnan(new.low) | np.isnan(new.high)
        return Interval(
            np.where(absent, old.low, new.low),
            np.where(absent, old.high, new.high),
            new.dtype,
            self.contracted,
        )

    def exponential(self, base: float, exponent: Value) -> Value:
        ends = np.power(np.float64(base), exponent.low), np.power(np.float64(base), exponent.high)
        low, high = np.minimum(*ends), np.maximum(*ends)
        # An ULP is 2u of a power of two, but hardly more than u just below it, where Adam's powers are.
        fraction = np.maximum(np.minimum(np.frexp(low)[0], np.frexp(high)[0]), 0.5)
        never = (exponent.low == 0) & (exponent.high == 0)  # to the power of 0: exactly 1
        return exponent.widened(low, high, np.where(never, 0.0, POWER_ULPS * UNIT / fraction))

    def lerp(self, old: Value, new: Value, weight: Value) -> Value:
        # Compiled or not: PyTorch's kernel fuses.
        old, new, weight = (replace(value, contracted=True) for value in (old, new, weight))
        ends = old + weight * (new - old), new - (new - old) * (1.0 - weight)
        return self.if_greater(-weight, -0.5, *ends)

    def absolute(self, value: Value) -> Value:
        low = np.where(
            (value.low < 0) & (value.high > 0), 0.0, np.minimum(np.abs(value.low), np.abs(value.high))
        )
        return self.widen(Interval(low, np.maximum(np.abs(value.low), np.abs(value.high))))

    def sign(self, value: Value) -> Value:
        return self.widen(Interval(np.sign(value.low), np.sign(value.high)))

    def floor(self, value: Value) -> Value:
        return self.widen(Interval(np.floor(value.low), np.floor(value.high)))

    def largest(self, value: Value, axis: int) -> Value:
        return self.widen(
            Interval(value.low.max(axis=axis, keepdims=True), value.high.max(axis=axis, keepdims=True))
        )

    def if_greater(self, left: Value, right: Value, then: Value, otherwise: Value) -> Value:
        other = left._other(right)
        yes, no = left._other(then), left._other(otherwise)
        absent = np.isnan(left.low) | np.isnan(left.high) | np.isnan(other.low) | np.isnan(other.high)
        surely, never = left.low > other.high, (left.high <= other.low) | absent
        either = self._hull(yes, no)
        low = np.where(surely, yes.low, np.where(never, no.low, either.low))
        high = np.where(surely, yes.high, np.where(never, no.high, either.high))
        return self.widen(Interval(low, high))

    def sequential_sum(self, value: Value, dtype: str) -> Value:
        total = self.widen(0.0)
        for low, high in zip(np.ravel(value.low), np.ravel(value.high), strict=True):
            term = Interval(np.asarray(low), np.asarray(high), "float32", self.contracted)
            total = self.rounded(total + term, dtype)
        return total

    def either(self, first: Callable[[], Value], second: Callable[[], Value]) -> Value:
        return self._hull(first(), second())

    def one_minus_power(self, base: float, exponent: Value) -> Value:
        exact = np.asarray(-math.expm1(exponent * math.log(base)))
        return Interval(exact, exact, "float32", True).widened(exact, exact, DECAY_UNITS * UNIT)

    def where(self, condition: Value, then: Value, otherwise: Value) -> Value:
        return then if condition else otherwise

    def set_row(self, value: Value, row: Value, new: Value) -> Value:
        low, high = value.low.copy(), value.high.copy()
        low[row], high[row] = new.low, new.high
        return Interval(low, high, value.dtype, self.contracted)

    def order_statistic(self, value: Value, place: int) -> Value:
        return Interval(
            np.asarray(np.sort(value.low)[place]),
            np.asarray(np.sort(value.high)[place]),
            value.dtype,
            self.contracted,
        )

    def _hull(self, first: Interval, other: Interval) -> Interval:
        low, high = np.minimum(first.low, other.low), np.maximum(first.high, other.high)
        return Interval(low, high, "float32", self.contracted)

    def _total(self, value: Value, axes: tuple[int, ...], keepdims: bool) -> Interval:
        count = math.prod(value.low.shape[axis] for axis in axes)
        low, high = value.low.sum(axis=axes, keepdims=keepdims), value.high.sum(axis=axes, keepdims=keepdims)
        size = np.maximum(np.abs(value.low), np.abs(value.high)).sum(axis=axes, keepdims=keepdims)
        error = np.where(np.isfinite(size), gamma(count) * size, 0.0)
        # Whatever is rounded, terms that aren't negative make no negative sum, of which there would be no root.
        low = np.where(
            (value.low >= 0).all(axis=axes, keepdims=keepdims), np.maximum(low - error, 0.0), low - error
        )
        high = np.where(
            (value.high <= 0).all(axis=axes, keepdims=keepdims), np.minimum(high + error, 0.0), high + error
        )
        wide: Interval = value.widened(low, high, 0.0)
        return wide
