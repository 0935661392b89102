"""The array namespace of NumPy: the plain one, and the float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.arrays.backend import Backend, Value
from statekit.tensors.tensor import DTYPES, Array


@dataclass(frozen=True)
class NumpyBackend(Backend):
    """NumPy on the CPU; with `compute=float64` the oracle, which also rounds nothing on the way."""

    compute: str = "float32"
    name: str = "numpy"
    contracts: bool = False
    sqrt_units: float = 0.0

    def asarray(self, array: Array) -> Value:
        return array

    def numpy(self, value: Value) -> Array:
        return np.asarray(value)

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with np.errstate(all="ignore"):  # a NaN or Inf gradient is data here, as in every other backend
                return step(*args)

        return run

    def widen(self, value: Value) -> Value:
        return np.asarray(value).astype(self.compute)

    def narrow(self, value: Value, dtype: str) -> Value:
        return np.asarray(value).astype(DTYPES[dtype])

    def rounded(self, value: Value, dtype: str) -> Value:
        if self.compute in (dtype, "float64"):
            return value
        return np.asarray(value).astype(DTYPES[dtype]).astype(self.compute)

    def emulated(self, function: Callable[[Backend, Value], Value], value: Value, within: float) -> Value:
        if self.compute == "float32":
            return function(self, value)
        # What is emulated is its roundings: without them the oracle would compute another function.
        return self.widen(function(NumpyBackend(), np.asarray(value).astype(np.float32)))

    def zeros(self, like: Value, shape: tuple[int, ...], dtype: str) -> Value:
        return np.zeros(shape, DTYPES[dtype])

    def sum(self, *values: Value) -> Value:
        return np.asarray(sum(np.sum(value, dtype=self.compute) for value in values))

    def norm(self, value: Value) -> Value:
        peak = np.max(np.abs(value), initial=0.0)
        scaled = value / np.where(peak > 0, peak, 1.0)
        return np.where(peak < np.inf, peak * np.sqrt(np.sum(scaled * scaled, dtype=self.compute)), peak)

    def mean(self, value: Value, axes: tuple[int, ...], keepdims: bool = False) -> Value:
        if not axes:
            return value
        count = math.prod(value.shape[axis] for axis in axes)
        return np.asarray(np.sum(value, axis=axes, keepdims=keepdims, dtype=self.compute) / np.float32(count))

    def permuted(self, value: Value, axes: tuple[int, ...]) -> Value:
        return np.transpose(value, axes)

    def matmul(self, left: Value, right: Value) -> Value:
        return np.matmul(left, right)

    def sqrt(self, value: Value) -> Value:
        return math.sqrt(value) if type(value) is float else np.sqrt(value)

    def power(self, value: Value, exponent: float) -> Value:
        return np.power(value, np.asarray(exponent, self.compute))

    def maximum(self, left: Value, right: Value) -> Value:
        return np.maximum(left, right)

    def minimum(self, left: Value, right: Value) -> Value:
        return np.minimum(left, right)

    def keep_nan(self, new: Value, old: Value) -> Value:
        return np.where(np.isnan(new), old, new)

    def exponential(self, base: float, exponent: Value) -> Value:
        return np.power(np.asarray(base, self.compute), exponent)

    def absolute(self, value: Value) -> Value:
        return np.abs(value)

    def sign(self, value: Value) -> Value:
        return np.sign(value)

    def floor(self, value: Value) -> Value:
        return np.floor(value)

    def largest(self, value: Value, axis: int) -> Value:
        return np.max(value, axis=axis, keepdims=True)

    def if_greater(self, left: Value, right: Value, then: Value, otherwise: Value) -> Value:
        return np.where(left > right, then, otherwise)

    def sequential_sum(self, value: Value, dtype: str) -> Value:
        total = np.zeros((), self.compute)
        for term in np.ravel(value):
            total = self.rounded(total + term, dtype)
        return total

    def one_minus_power(self, base: float, exponent: Value) -> Value:
        if isinstance(exponent, int):
            return 1.0 - base**exponent
        return -np.expm1(self.widen(exponent) * np.asarray(math.log(base), self.compute))

    def where(self, condition: Value, then: Value, otherwise: Value) -> Value:
        return then if condition else otherwise

    def set_row(self, value: Value, row: Value, new: Value) -> Value:
        changed = value.copy()
        changed[row] = new
        return changed

    def order_statistic(self, value: Value, place: int) -> Value:
        return np.asarray(np.sort(value)[place])


ORACLE = NumpyBackend("float64", "float64")
"""The same mathematics in float64, without the roundings on the way."""
