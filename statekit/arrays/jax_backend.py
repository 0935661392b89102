"""The array namespace of JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from statekit.arrays.backend import Backend, Value
from statekit.tensors.tensor import Array


class JaxBackend(Backend):
    """JAX, one jitted computation per step."""

    name = "jax"
    contracts = True
    sqrt_units = 0.0

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self._jax, self._jnp = jax, jnp

    def asarray(self, array: Array) -> Value:
        return self._jnp.asarray(array)

    def numpy(self, value: Value) -> Array:
        return np.asarray(value)

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return self._jax.jit(step)  # type: ignore[no-any-return]  # jit says Any

    def widen(self, value: Value) -> Value:
        return self._jnp.asarray(value).astype(self._jnp.float32)

    def narrow(self, value: Value, dtype: str) -> Value:
        canonical = self._jax.dtypes.canonicalize_dtype(dtype)  # without x64, float64 is held as float32
        floating = self._jnp.issubdtype(canonical, self._jnp.floating)
        return (self.rounded(value, canonical.name) if floating else value).astype(canonical)

    def rounded(self, value: Value, dtype: str) -> Value:
        if dtype == "float32":
            return value
        # XLA may drop a pair of casts; it never drops reduce_precision.
        info = self._jnp.finfo(dtype)
        normal = self._jax.lax.reduce_precision(value, exponent_bits=info.nexp, mantissa_bits=info.nmant)
        if info.nexp == self._jnp.finfo("float32").nexp:
            return normal
        # What it makes zero is subnormal in dtype: a multiple of the smallest one.
        least = float(info.smallest_subnormal)
        subnormal = self._jnp.round(value / least) * least
        return self._jnp.where(self._jnp.abs(value) < float(info.smallest_normal), subnormal, normal)

    def zeros(self, like: Value, shape: tuple[int, ...], dtype: str) -> Value:
        return self._jnp.zeros(shape, self._jax.dtypes.canonicalize_dtype(dtype))

    def sum(self, *values: Value) -> Value:
        return sum(self._jnp.sum(value) for value in values)

    def norm(self, value: Value) -> Value:
        peak = self._jnp.max(self._jnp.abs(value), initial=0.0)
        scaled = value / self._jnp.where(peak > 0, peak, 1.0)
        return self._jnp.where(peak < math.inf, peak * self._jnp.sqrt(self._jnp.sum(scaled * scaled)), peak)

    def mean(self, value: Value, axes: tuple[int, ...], keepdims: bool = False) -> Value:
        return self._jnp.mean(value, axis=axes, keepdims=keepdims) if axes else value

    def permuted(self, value: Value, axes: tuple[int, ...]) -> Value:
        return self._jnp.transpose(value, axes)

    def matmul(self, left: Value, right: Value) -> Value:
        return self._jnp.matmul(left, right, precision=self._jax.lax.Precision.HIGHEST)

    def sqrt(self, value: Value) -> Value:
        return math.sqrt(value) if isinstance(value, float) else self._jnp.sqrt(value)

    def power(self, value: Value, exponent: float) -> Value:
        return self._jnp.power(value, self._jnp.float32(exponent))

    def maximum(self, left: Value, right: Value) -> Value:
        return self._jnp.maximum(left, right)

    def minimum(self, left: Value, right: Value) -> Value:
        return self._jnp.minimum(left, right)

    def keep_nan(self, new: Value, old: Value) -> Value:
        return self._jnp.where(self._jnp.isnan(new), old, new)

    def exponential(self, base: float, exponent: Value) -> Value:
        return self._jnp.power(self._jnp.float32(base), exponent)

    def absolute(self, value: Value) -> Value:
        return self._jnp.abs(value)

    def sign(self, value: Value) -> Value:
        return self._jnp.sign(value)

    def floor(self, value: Value) -> Value:
        return self._jnp.floor(value)

    def largest(self, value: Value, axis: int) -> Value:
        return self._jnp.max(value, axis=axis, keepdims=True)

    def if_greater(self, left: Value, right: Value, then: Value, otherwise: Value) -> Value:
        return self._jnp.where(left > right, then, otherwise)

    def sequential_sum(self, value: Value, dtype: str) -> Value:
        def add(total: Value, term: Value) -> tuple[Value, None]:
            return self.rounded(total + term, dtype), None

        return self._jax.lax.scan(add, self._jnp.zeros((), self._jnp.float32), value.reshape(-1))[0]

    def one_minus_power(self, base: float, exponent: Value) -> Value:
        if isinstance(exponent, int):
            return 1.0 - base**exponent
        return -self._jnp.expm1(self.widen(exponent) * math.log(base))

    def where(self, condition: Value, then: Value, otherwise: Value) -> Value:
        return self._jnp.where(condition, then, otherwise)

    def set_row(self, value: Value, row: Value, new: Value) -> Value:
        return value.at[row].set(new)

    def stack(self, values: Sequence[Value]) -> Value:
        return self._jnp.stack(values)

    def unstack(self, value: Value) -> Sequence[Value]:
        return self._jnp.unstack(value)

    def batched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._jax.vmap(function)  # type: ignore[no-any-return]  # vmap says Any

    def order_statistic(self, value: Value, place: int) -> Value:
        return self._jnp.sort(value)[place]
