"""JAX's arithmetic of low precision over any array namespace: every value knows the dtype that JAX would give it.

The steps' text widens what it is given and computes in float32. Over `Promoting` the same text computes as JAX does:

- an operation returns the dtype that its arrays are promoted to, rounded to it: two bfloat16 arrays make one, bfloat16
  beside float32 makes float32. A Python number has no dtype of its own and is rounded to that of the array it meets;
- op by op every result is rounded. Compiled, a bfloat16 result that goes on as float32 isn't: XLA drops the pair of
  casts. One that goes on as bfloat16 is, and so is float16, always;
- in float16 a quotient by what is broadcast is a product with its rounded reciprocal (XLA's simplifier does that in an
  eager operation too); one element over one isn't.

Source: jax 0.10.2 and XLA on CPUs, observed beside optax 0.2.8 (tests/living); JAX documentation, "Type promotion
semantics".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from statekit.arrays.backend import Backend, Value, round_number
from statekit.tensors.tensor import Array

LOW = ("bfloat16", "float16")
"""Dtypes of low precision."""


@dataclass(frozen=True, eq=False)
class Typed:
    """An array in the compute dtype that stands for one of another dtype.

    Attributes:
        xp: Where it lives.
        value: The array in the compute dtype.
        dtype: The dtype that it stands for.
        exact: Whether its last rounding, to `dtype`, is still to be made.
    """

    xp: Promoting
    value: Value
    dtype: str
    exact: bool = False

    __array_ufunc__ = None

    def held(self, dtype: str) -> Value:
        """Returns the value as an operation of some dtype takes it."""
        if self.exact and dtype == self.dtype:
            return self.xp.inner.rounded(self.value, self.dtype)
        return self.value

    def __neg__(self) -> Typed:
        return replace(self, value=-self.value)

    def __add__(self, other: Any) -> Typed:
        return self.xp.operation(lambda a, b: a + b, self, other)

    def __radd__(self, other: Any) -> Typed:
        return self.xp.operation(lambda a, b: a + b, other, self)

    def __sub__(self, other: Any) -> Typed:
        return self.xp.operation(lambda a, b: a - b, self, other)

    def __rsub__(self, other: Any) -> Typed:
        return self.xp.operation(lambda a, b: a - b, other, self)

    def __mul__(self, other: Any) -> Typed:
        return self.xp.operation(lambda a, b: a * b, self, other)

    def __rmul__(self, other: Any) -> Typed:
        return self.xp.operation(lambda a, b: a * b, other, self)

    def __truediv__(self, other: Any) -> Typed:
        if (
            isinstance(other, Typed)
            and self.dtype == other.dtype == "float16"
            and self.xp.spreads(other, self)
        ):
            return self.xp.operation(lambda a, b: a * b, self, 1.0 / other)
        return self.xp.operation(lambda a, b: a / b, self, other)

    def __rtruediv__(self, other: Any) -> Typed:
        return self.xp.operation(lambda a, b: a / b, other, self)


@dataclass(frozen=True)
class Promoting(Backend):
    """JAX's promotion over another array namespace.

    Attributes:
        inner: Where arrays live.
        op_by_op: Whether every operation rounds by itself.
        loose: Dtypes in which the compiler's own roundings aren't followed one by one: a bound then takes every result
            within one rounding of the exact one.
    """

    inner: Backend
    op_by_op: bool
    loose: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def contracts(self) -> bool:
        return self.inner.contracts

    @property
    def sqrt_units(self) -> float:
        return self.inner.sqrt_units

    def operation(self, function: Callable[..., Value], *values: Any) -> Typed:
        """Returns what an operation makes of values, some of which may be Python numbers."""
        dtype = promoted(*(value.dtype for value in values if isinstance(value, Typed)))
        taken = [self._taken(value, dtype) for value in values]
        if len(values) > 1 and all(value is values[0] for value in values):
            taken = [taken[0]] * len(values)  # a square stays one
        return self._returned(function(*taken), dtype)

    def _taken(self, value: Any, dtype: str) -> Value:
        return value.held(dtype) if isinstance(value, Typed) else round_number(value, dtype)

    def _returned(self, value: Value, dtype: str) -> Typed:
        if dtype == "float32":
            return Typed(self, value, dtype)
        about = self.inner.about(value, dtype) if dtype in self.loose else None
        if about is not None:
            return Typed(self, about, dtype)
        if self.op_by_op or dtype != "bfloat16":
            return Typed(self, self.inner.rounded(value, dtype), dtype)
        return Typed(self, value, dtype, exact=True)

    def _rounded(self, value: Value, dtype: str) -> Value:
        about = self.inner.about(value, dtype) if dtype in self.loose else None
        return self.inner.rounded(value, dtype) if about is None else about

    def reduction(self, function: Callable[[Value], Value], value: Typed) -> Typed:
        """Returns what a reduction makes of a value: a float32 sum of rounded values, rounded."""
        result = self._rounded(function(value.held(value.dtype)), value.dtype)
        return Typed(self, result, value.dtype)

    def spreads(self, divisor: Typed, value: Typed) -> bool:
        """Tells whether a divisor is broadcast: one of its elements divides several."""
        return math.prod(self.shape(divisor)) < math.prod(self.shape(value))

    def asarray(self, array: Array) -> Value:
        return self.inner.asarray(array)

    def numpy(self, value: Value) -> Array:
        return self.inner.numpy(value)

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return self.inner.compile(step)

    def widen(self, value: Value) -> Value:
        if isinstance(value, Typed):
            return value
        floating = not isinstance(value, (int, float)) and self.inner.dtype(value) in LOW
        return Typed(self, self.inner.widen(value), self.inner.dtype(value) if floating else "float32")

    def narrow(self, value: Value, dtype: str) -> Value:
        return self.inner.narrow(value.held(dtype) if isinstance(value, Typed) else value, dtype)

    def rounded(self, value: Value, dtype: str) -> Value:
        if dtype == "float32":  # nothing is rounded that an operation didn't round
            return value
        return Typed(self, self._rounded(value.value, dtype), dtype)

    def cast(self, value: Value, dtype: str) -> Value:
        if not isinstance(value, Typed):
            return round_number(value, dtype)
        return self._returned(value.value, dtype)

    def constant(self, value: float, dtype: str = "float32") -> float:
        return value if dtype == "float32" else round_number(value, dtype)

    def literal(self, value: Value) -> Value:
        return value if isinstance(value, (int, float)) else self.widen(value)

    def number(self, value: Value) -> Value:
        return float(value) if isinstance(value, (int, float)) else self.widen(value)

    def shape(self, value: Value) -> tuple[int, ...]:
        return self.inner.shape(value.value if isinstance(value, Typed) else value)

    def dtype(self, value: Value) -> str:
        return value.dtype if isinstance(value, Typed) else self.inner.dtype(value)

    def zeros(self, like: Value, shape: tuple[int, ...], dtype: str) -> Value:
        return self.inner.zeros(like.value if isinstance(like, Typed) else like, shape, dtype)

    def sum(self, *values: Value) -> Value:
        # A sum over several arrays is one of their sums, each of the dtype of its array.
        parts = [self.reduction(self.inner.sum, value) for value in values]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def euclidean(self, value: Value) -> Value:
        # One compiled function, eager too: bfloat16 squares go on unrounded.
        x = value.held(value.dtype)
        if math.prod(self.shape(value)) == 1:  # the root of one square is the size itself
            return self.reduction(self.inner.sum, self.absolute(value))
        square = self._rounded(x * x, value.dtype) if value.dtype == "float16" else x * x
        total = self._returned(self.inner.sum(square), value.dtype)
        return self.operation(self.inner.sqrt, total)

    def norm(self, value: Value) -> Value:
        return self.reduction(self.inner.norm, value)

    def mean(self, value: Value, axes: tuple[int, ...], keepdims: bool = False) -> Value:
        if not axes:
            return value
        return self.reduction(lambda array: self.inner.mean(array, axes, keepdims), value)

    def expand(self, value: Value, axes: tuple[int, ...]) -> Value:
        return replace(value, value=self.inner.expand(value.value, axes))

    def emulated(self, function: Callable[[Backend, Value], Value], value: Value, within: float) -> Value:
        return self.operation(lambda array: self.inner.emulated(function, array, within), value)

    def sqrt(self, value: Value) -> Value:
        return self.operation(self.inner.sqrt, value) if isinstance(value, Typed) else self.inner.sqrt(value)

    def power(self, value: Value, exponent: float) -> Value:
        return self.operation(lambda array: self.inner.power(array, exponent), value)

    def maximum(self, left: Value, right: Value) -> Value:
        return self.operation(self.inner.maximum, left, right)

    def minimum(self, left: Value, right: Value) -> Value:
        return self.operation(self.inner.minimum, left, right)

    def keep_nan(self, new: Value, old: Value) -> Value:
        return self.inner.keep_nan(new, old)

    def exponential(self, base: float, exponent: Value) -> Value:
        return self.operation(lambda power: self.inner.exponential(base, power), exponent)

    def if_greater(self, left: Value, right: Value, then: Value, otherwise: Value) -> Value:
        dtype = promoted(*(side.dtype for side in (left, right) if isinstance(side, Typed)))
        low, high = self._taken(left, dtype), self._taken(right, dtype)
        return self.operation(lambda a, b: self.inner.if_greater(low, high, a, b), then, otherwise)

    def absolute(self, value: Value) -> Value:
        return self.operation(self.inner.absolute, value)

    def sign(self, value: Value) -> Value:
        return self.operation(self.inner.sign, value)

    def floor(self, value: Value) -> Value:
        return self.operation(self.inner.floor, value)

    def largest(self, value: Value, axis: int) -> Value:
        return self.operation(lambda array: self.inner.largest(array, axis), value)

    def sequential_sum(self, value: Value, dtype: str) -> Value:
        return self.operation(lambda array: self.inner.sequential_sum(array, dtype), value)

    def one_minus_power(self, base: float, exponent: Value) -> Value:
        power = self.inner.one_minus_power(base, exponent)
        return power if isinstance(power, float) else Typed(self, power, "float32")

    def where(self, condition: Value, then: Value, otherwise: Value) -> Value:
        return self.operation(lambda a, b: self.inner.where(condition, a, b), then, otherwise)

    def set_row(self, value: Value, row: Value, new: Value) -> Value:
        return self.operation(lambda array, other: self.inner.set_row(array, row, other), value, new)

    def order_statistic(self, value: Value, place: int) -> Value:
        return self.operation(lambda array: self.inner.order_statistic(array, place), value)


def promoted(*dtypes: str) -> str:
    """Returns the dtype in which JAX leaves an operation on arrays of these floating dtypes."""
    return dtypes[0] if len(set(dtypes)) == 1 else "float32"


def any_low(xp: Backend, values: Iterable[Value]) -> bool:
    """Tells whether some of the arrays are of low precision."""
    return any(xp.dtype(value) in LOW for value in values)
