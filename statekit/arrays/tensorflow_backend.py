"""The array namespace of TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from statekit.arrays.backend import Backend, Value, expanded_shape
from statekit.tensors.tensor import DTYPES, Array, float_info


class TensorFlowBackend(Backend):
    """TensorFlow, one XLA computation per step; the operations also run eagerly and in anyone's `tf.function`."""

    name = "tensorflow"
    contracts = True
    sqrt_units = 0.0

    def __init__(self) -> None:
        import tensorflow as tf

        self._tf = tf

    def asarray(self, array: Array) -> Value:
        return self._tf.constant(np.array(array))  # its own copy: an eager tensor may share NumPy's memory

    def numpy(self, value: Value) -> Array:
        return np.asarray(value.numpy())

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        # Autograph would rewrite the text's own branches, which never depend on values.
        compiled = self._tf.function(step, jit_compile=True, autograph=False)

        def run(*args: Any) -> Any:
            return compiled(*self._tf.nest.map_structure(self._argument, args))

        return run

    def widen(self, value: Value) -> Value:
        if isinstance(value, (int, float)):
            return self._tf.constant(value, self._tf.float32)
        return self._tf.cast(value, self._tf.float32)

    def narrow(self, value: Value, dtype: str) -> Value:
        return self._tf.cast(self.rounded(value, dtype), dtype)

    def rounded(self, value: Value, dtype: str) -> Value:
        kind = DTYPES[dtype]
        if kind.kind in "iu" or kind.itemsize >= 4:
            return value
        # On the bits: XLA may drop a pair of casts, and keeps the excess precision.
        tf, info, value = self._tf, float_info(kind), self.widen(value)
        dropped = 23 - int(info.nmant)
        bits = tf.bitcast(value, tf.int32)
        odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, dropped), 1)
        bits = tf.bitwise.bitwise_and(bits + (2 ** (dropped - 1) - 1) + odd, -(2**dropped))
        near = tf.bitcast(bits, tf.float32)
        largest, unit = float(info.max), float(info.smallest_subnormal)
        near = tf.where(tf.abs(near) > largest, tf.sign(value) * math.inf, near)
        if info.minexp > -126:  # below its own normal range a narrower exponent leaves multiples of one unit
            small = tf.abs(value) < float(info.smallest_normal)
            near = tf.where(small, tf.round(value * (1.0 / unit)) * unit, near)
        return tf.where(tf.math.is_nan(value), value, near)

    def zeros(self, like: Value, shape: tuple[int, ...], dtype: str) -> Value:
        return self._tf.zeros(shape, dtype)

    def sum(self, *values: Value) -> Value:
        return sum(self._tf.reduce_sum(value) for value in values)

    def norm(self, value: Value) -> Value:
        tf = self._tf
        if 0 in value.shape:
            return self.widen(0.0)
        peak = self.largest(tf.reshape(tf.abs(value), (-1,)), 0)[0]
        scaled = value / tf.where(peak > 0, peak, 1.0)
        return tf.where(peak < math.inf, peak * tf.sqrt(tf.reduce_sum(scaled * scaled)), peak)

    def mean(self, value: Value, axes: tuple[int, ...], keepdims: bool = False) -> Value:
        if not axes:
            return value
        count = math.prod(value.shape[axis] for axis in axes)
        return self._tf.reduce_sum(value, axes, keepdims=keepdims) / float(count)

    def expand(self, value: Value, axes: tuple[int, ...]) -> Value:
        return self._tf.reshape(value, expanded_shape(tuple(value.shape), axes))

    def reshaped(self, value: Value, shape: tuple[int, ...]) -> Value:
        return self._tf.reshape(value, shape)

    def permuted(self, value: Value, axes: tuple[int, ...]) -> Value:
        return self._tf.transpose(value, axes)

    def matmul(self, left: Value, right: Value) -> Value:
        return self._tf.matmul(left, right)

    def sqrt(self, value: Value) -> Value:
        return math.sqrt(value) if isinstance(value, float) else self._tf.sqrt(value)

    def power(self, value: Value, exponent: float) -> Value:
        return self._tf.pow(value, exponent)

    # XLA's own maximum and minimum lose a NaN, by its place; a comparison doesn't.
    def maximum(self, left: Value, right: Value) -> Value:
        return self._tf.where((left >= right) | self._tf.math.is_nan(left), left, right)

    def minimum(self, left: Value, right: Value) -> Value:
        return self._tf.where((left <= right) | self._tf.math.is_nan(left), left, right)

    def keep_nan(self, new: Value, old: Value) -> Value:
        return self._tf.where(self._tf.math.is_nan(new), old, new)

    def exponential(self, base: float, exponent: Value) -> Value:
        return self._tf.pow(self.widen(base), exponent)

    def absolute(self, value: Value) -> Value:
        return self._tf.abs(value)

    def sign(self, value: Value) -> Value:
        return self._tf.sign(value)

    def floor(self, value: Value) -> Value:
        return self._tf.floor(value)

    def largest(self, value: Value, axis: int) -> Value:
        absent = self._tf.reduce_any(self._tf.math.is_nan(value), axis, keepdims=True)
        return self._tf.where(absent, math.nan, self._tf.reduce_max(value, axis, keepdims=True))

    def if_greater(self, left: Value, right: Value, then: Value, otherwise: Value) -> Value:
        return self._tf.where(left > right, then, otherwise)

    def sequential_sum(self, value: Value, dtype: str) -> Value:
        if 0 in value.shape:
            return self.widen(0.0)
        flat = self._tf.reshape(value, (-1,))

        def add(i: Value, total: Value) -> tuple[Value, Value]:
            return i + 1, self.rounded(total + flat[i], dtype)

        loop = self._tf.while_loop(lambda i, _: i < flat.shape[0], add, (self._tf.constant(0), self.widen(0)))
        return loop[1]

    def one_minus_power(self, base: float, exponent: Value) -> Value:
        if isinstance(exponent, int):
            return 1.0 - base**exponent
        return -self._tf.math.expm1(self.widen(exponent) * math.log(base))

    def where(self, condition: Value, then: Value, otherwise: Value) -> Value:
        if isinstance(condition, bool):
            return then if condition else otherwise
        return self._tf.where(condition, then, otherwise)

    def set_row(self, value: Value, row: Value, new: Value) -> Value:
        rows = self._tf.reshape(self._tf.range(value.shape[0]), (-1,) + (1,) * (len(value.shape) - 1))
        return self._tf.where(rows == row, new, value)

    def order_statistic(self, value: Value, place: int) -> Value:
        tf, wide = self._tf, self.widen(value)
        absent = tf.math.is_nan(wide)  # TensorFlow's sort leaves NaN anywhere
        present = wide.shape[0] - tf.reduce_sum(tf.cast(absent, tf.int32))
        ordered = tf.sort(tf.where(absent, math.inf, wide))
        return tf.where(place < present, ordered[place], math.nan)

    def _argument(self, value: Any) -> Any:
        """Makes a tensor of a number, because `tf.function` would compile anew for each."""
        if isinstance(value, (int, float)):
            return self._tf.constant(value, self._tf.int32 if isinstance(value, int) else self._tf.float32)
        return value
