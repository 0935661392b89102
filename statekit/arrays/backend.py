"""Array namespaces for the steps: the few operations that the mathematics in statekit/optim is written over.

Arithmetic runs in the backend's compute dtype: float32, or float64 for the oracle. Values of lower precision are
widened first, and every rounding that the original makes is written out with `rounded`, so that nothing depends on a
framework's promotion rules or on what a compiler keeps in wider registers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from statekit.errors import MissingExtraError, NotFoundError, UsageError, extra
from statekit.tensors.tensor import DTYPES, Array

Value: TypeAlias = Any
"""An array of a backend; numbers mix with them."""


class Backend(Protocol):
    """What a step may do with arrays, beside the operators + - * / and unary minus.

    A method with a body is what most backends do; they inherit it.
    """

    @property
    def name(self) -> str:
        """`numpy`, `torch`, `jax`, ..."""

    @property
    def contracts(self) -> bool:
        """Whether products and sums may be contracted (fused multiply-add) and quotients rounded twice."""

    @property
    def sqrt_units(self) -> float:
        """How far a square root may be from the exact one, in units of 2^-24 of it; 0: no farther than IEEE allows."""

    @property
    def device(self) -> str:
        """Where its arrays live, as the framework names it."""
        return "cpu"

    def asarray(self, array: Array) -> Value:
        """Takes over a NumPy array with its dtype."""

    def numpy(self, value: Value) -> Array:
        """Returns a NumPy array with the value's dtype."""

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a step over pytrees of arrays as this backend runs it."""

    def widen(self, value: Value) -> Value:
        """Returns the value in the compute dtype (an int becomes a 0-d array)."""

    def narrow(self, value: Value, dtype: str) -> Value:
        """Returns the value rounded (to nearest even) to a storage dtype and held in it."""

    def rounded(self, value: Value, dtype: str) -> Value:
        """Returns the value rounded to a dtype but held in the compute dtype."""

    def constant(self, value: float, dtype: str = "float32") -> float:
        """Returns a number as the original holds it: rounded to a dtype."""
        return round_number(value, dtype)

    def cast(self, value: Value, dtype: str) -> Value:
        """Returns the value as one of a dtype, where the dtypes of values decide how operations round."""
        return value

    def literal(self, value: Value) -> Value:
        """Returns a scalar that an original may write into its step as a number without a dtype."""
        return self.widen(value)

    def number(self, value: Value) -> Value:
        """Returns a scalar in its best precision: a Python number stays a float64."""
        return float(value) if isinstance(value, (int, float)) else self.widen(value)

    def shape(self, value: Value) -> tuple[int, ...]:
        """Returns the shape."""
        return tuple(value.shape)

    def dtype(self, value: Value) -> str:
        """Returns the dtype's name."""
        return str(value.dtype.name)

    def zeros(self, like: Value, shape: tuple[int, ...], dtype: str) -> Value:
        """Returns zeros where `like` lives."""

    def sum(self, *values: Value) -> Value:
        """Returns the sum of all elements of some arrays, 0-d."""

    def euclidean(self, value: Value) -> Value:
        """Returns the root of the sum of squares of all elements, 0-d."""
        return self.sqrt(self.sum(value * value))

    def norm(self, value: Value) -> Value:
        """Returns the root of the sum of squares of all elements, 0-d; no square over- or underflows on the way."""

    def mean(self, value: Value, axes: tuple[int, ...], keepdims: bool = False) -> Value:
        """Returns the mean over some axes; over none, the value itself."""

    def expand(self, value: Value, axes: tuple[int, ...]) -> Value:
        """Inserts axes of length 1 at these positions of the result."""
        return value.reshape(expanded_shape(tuple(value.shape), axes))

    def reshaped(self, value: Value, shape: tuple[int, ...]) -> Value:
        """Returns the elements in another shape, in C order."""
        return value if tuple(value.shape) == shape else value.reshape(shape)

    def permuted(self, value: Value, axes: tuple[int, ...]) -> Value:
        """Returns the value with its axes in another order."""
        raise UsageError("An array namespace has no matrices.", found=self.name)

    def transposed(self, value: Value) -> Value:
        """Returns each matrix of the last two axes transposed."""
        rank = len(self.shape(value))
        return self.permuted(value, (*range(rank - 2), rank - 1, rank - 2))

    def matmul(self, left: Value, right: Value) -> Value:
        """Returns the products of matrices of the last two axes, summed in the compute dtype."""
        raise UsageError("An array namespace has no matrices.", found=self.name)

    def emulated(self, function: Callable[[Backend, Value], Value], value: Value, within: float) -> Value:
        """Returns what a function of an array gives whose roundings no bound can follow.

        Args:
            function: Takes a backend and the array.
            value: The array.
            within: How far two executions may be apart, of the result's largest element; a bound goes by this.
        """
        return function(self, value)

    def sqrt(self, value: Value) -> Value:
        """Returns the square root; of a number, a number."""

    def power(self, value: Value, exponent: float) -> Value:
        """Returns the value raised to a number."""

    def maximum(self, left: Value, right: Value) -> Value:
        """Returns the larger, NaN if one is NaN."""

    def minimum(self, left: Value, right: Value) -> Value:
        """Returns the smaller, NaN if one is NaN."""

    def keep_nan(self, new: Value, old: Value) -> Value:
        """Returns `new`, but `old` where `new` is NaN."""

    def exponential(self, base: float, exponent: Value) -> Value:
        """Returns a number raised to a value."""

    def lerp(self, old: Value, new: Value, weight: Value) -> Value:
        """Returns old + weight * (new - old); the same from the other end for a weight that isn't below 1/2.

        Which end it is decides what becomes of an infinity.
        Source: pytorch/pytorch, aten/src/ATen/native/Lerp.h, `lerp`.
        """
        return self.if_greater(-weight, -0.5, old + weight * (new - old), new - (new - old) * (1.0 - weight))

    def absolute(self, value: Value) -> Value:
        """Returns the absolute value."""

    def sign(self, value: Value) -> Value:
        """Returns -1, 0 or 1."""

    def floor(self, value: Value) -> Value:
        """Returns the largest integer that isn't larger."""

    def largest(self, value: Value, axis: int) -> Value:
        """Returns the largest value along an axis, which stays with length 1."""

    def if_greater(self, left: Value, right: Value, then: Value, otherwise: Value) -> Value:
        """Returns `then` where left > right, else `otherwise`."""

    def sequential_sum(self, value: Value, dtype: str) -> Value:
        """Returns the sum over all axes in C order, rounded to a dtype after every addition; 0-d."""

    def either(self, first: Callable[[], Value], second: Callable[[], Value]) -> Value:
        """Returns the first of two values, where the kernels of an original arrive at one or at the other."""
        return first()

    def about(self, value: Value, dtype: str) -> Value | None:
        """Returns all that lies within one rounding to `dtype` of a value; None where nothing is bounded."""
        return None

    def one_minus_power(self, base: float, exponent: Value) -> Value:
        """Returns 1 - base**exponent without cancellation, as a number if the exponent is one; 0 < base < 1."""

    def where(self, condition: Value, then: Value, otherwise: Value) -> Value:
        """Returns `then` if a bool (or 0-d boolean array) is true, else `otherwise`."""

    def set_row(self, value: Value, row: Value, new: Value) -> Value:
        """Returns the array with one row of its first axis replaced."""

    def order_statistic(self, value: Value, place: int) -> Value:
        """Returns what stands at a place once a 1-d array is sorted; NaN stands last."""


class Batching(Protocol):
    """What a backend offers beside, if it can run a function over many arrays of one shape at once."""

    def stack(self, values: Sequence[Value]) -> Value:
        """Returns arrays of one shape and dtype along a new first axis."""

    def unstack(self, value: Value) -> Sequence[Value]:
        """Returns the parts along the first axis."""

    def batched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that takes all its arrays, and returns all of its own, with one more first axis."""


def round_number(value: float, dtype: str) -> float:
    """Returns a number rounded to a dtype."""
    return float(np.asarray(value, np.float64).astype(DTYPES[dtype]))


def expanded_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape with axes of length 1 at these positions of the result."""
    kept = iter(shape)
    return tuple(1 if axis in axes else next(kept) for axis in range(len(shape) + len(axes)))


_BACKENDS = {
    "numpy": "statekit.arrays.numpy_backend:NumpyBackend",
    "torch": "statekit.arrays.torch_backend:TorchBackend",
    "jax": "statekit.arrays.jax_backend:JaxBackend",
    "tensorflow": "statekit.arrays.tensorflow_backend:TensorFlowBackend",
}
BACKEND_NAMES = tuple(_BACKENDS)


@cache
def backend(name: str, device: str | None = None) -> Backend:
    """Returns a backend by name, importing its framework.

    Args:
        name: Its name.
        device: Where PyTorch's arrays live, as `torch.device` names it; None: on the CPU.

    Raises:
        NotFoundError: No such backend.
        MissingExtraError: The framework isn't installed.
        UsageError: The backend takes no device, or there is no such device.
    """
    if device is not None and name != "torch":
        raise UsageError(
            "Only PyTorch's backend takes a device.",
            expected="torch",
            found=f"{name} on {device}",
            remedy="JAX and TensorFlow take the device that they find: set JAX_PLATFORMS, CUDA_VISIBLE_DEVICES",
        )
    if name not in _BACKENDS:
        raise NotFoundError("There is no such backend.", expected=", ".join(_BACKENDS), found=name)
    if importlib.util.find_spec(name) is None:
        raise MissingExtraError(f"The backend {name} isn't installed.", remedy=extra(name))
    module, _, kind = _BACKENDS[name].partition(":")
    options = () if device is None else (device,)
    return cast(Backend, getattr(importlib.import_module(module), kind)(*options))
