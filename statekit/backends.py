"""Array namespaces for the steps: the few operations that the mathematics in statekit/optim is written over.

Arithmetic runs in the backend's compute dtype: float32, or float64 for the oracle. Values of lower precision are
widened first, and every rounding that the original makes is written out with `rounded`, so that nothing depends on a
framework's promotion rules or on what a compiler keeps in wider registers.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias

import numpy as np

from statekit.errors import MissingExtraError, NotFoundError
from statekit.tensor import DTYPES, Array

Value: TypeAlias = Any
"""An array of a backend; numbers mix with them."""


class Backend(Protocol):
    """What a step may do with arrays, beside the operators + - * / and unary minus."""

    @property
    def name(self) -> str:
        """`numpy`, `torch`, `jax`, ..."""

    @property
    def compiles(self) -> bool:
        """Whether a step runs compiled, so that products and sums may be contracted (fused multiply-add)."""

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

    def shape(self, value: Value) -> tuple[int, ...]:
        """Returns the shape."""

    def dtype(self, value: Value) -> str:
        """Returns the dtype's name."""

    def zeros(self, like: Value, shape: tuple[int, ...], dtype: str) -> Value:
        """Returns zeros where `like` lives."""

    def sum(self, value: Value) -> Value:
        """Returns the sum over all axes, 0-d."""

    def mean(self, value: Value, axes: tuple[int, ...], keepdims: bool = False) -> Value:
        """Returns the mean over some axes; over none, the value itself."""

    def expand(self, value: Value, axes: tuple[int, ...]) -> Value:
        """Inserts axes of length 1 at these positions of the result."""

    def sqrt(self, value: Value) -> Value:
        """Returns the square root."""

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
        """Returns old + weight * (new - old), or the same from the other end."""

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


def _round_number(value: float, dtype: str) -> float:
    return float(np.asarray(value, np.float64).astype(DTYPES[dtype]))


def _expanded_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    kept = iter(shape)
    return tuple(1 if axis in axes else next(kept) for axis in range(len(shape) + len(axes)))


@dataclass(frozen=True)
class NumpyBackend:
    """NumPy on the CPU; with `compute=float64` the oracle, which also rounds nothing on the way."""

    compute: str = "float32"
    name: str = "numpy"
    compiles: bool = False

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

    def constant(self, value: float, dtype: str = "float32") -> float:
        return _round_number(value, dtype)

    def shape(self, value: Value) -> tuple[int, ...]:
        return tuple(value.shape)

    def dtype(self, value: Value) -> str:
        return str(value.dtype.name)

    def zeros(self, like: Value, shape: tuple[int, ...], dtype: str) -> Value:
        return np.zeros(shape, DTYPES[dtype])

    def sum(self, value: Value) -> Value:
        return np.asarray(np.sum(value, dtype=self.compute))

    def mean(self, value: Value, axes: tuple[int, ...], keepdims: bool = False) -> Value:
        if not axes:
            return value
        count = math.prod(value.shape[axis] for axis in axes)
        return np.asarray(np.sum(value, axis=axes, keepdims=keepdims, dtype=self.compute) / np.float32(count))

    def expand(self, value: Value, axes: tuple[int, ...]) -> Value:
        return value.reshape(_expanded_shape(value.shape, axes))

    def sqrt(self, value: Value) -> Value:
        return np.sqrt(value)

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

    def lerp(self, old: Value, new: Value, weight: Value) -> Value:
        return old + weight * (new - old)

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


class TorchBackend:
    """PyTorch, eager, on whatever device the tensors live."""

    name = "torch"
    compiles = False

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._dtypes = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
        self._names = {dtype: name for name, dtype in self._dtypes.items()}

    def asarray(self, array: Array) -> Value:
        bits = {"bfloat16": "int16", "float8_e4m3fn": "int8", "float8_e5m2": "int8"}.get(array.dtype.name)
        if bits is None:
            return self._torch.from_numpy(np.array(array))
        return self._torch.from_numpy(np.array(array.view(bits))).view(self._dtypes[array.dtype.name])

    def numpy(self, value: Value) -> Array:
        cpu = value.detach().cpu()
        if self.dtype(value) == "bfloat16":
            return np.asarray(cpu.view(self._torch.int16).numpy()).view(DTYPES["bfloat16"])
        return np.asarray(cpu.numpy())

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self._torch.no_grad():
                return step(*args)

        return run

    def widen(self, value: Value) -> Value:
        if isinstance(value, self._torch.Tensor):
            return value.to(self._torch.float32)
        return self._torch.tensor(value, dtype=self._torch.float32)

    def narrow(self, value: Value, dtype: str) -> Value:
        return value.to(self._dtypes[dtype])

    def rounded(self, value: Value, dtype: str) -> Value:
        return value if dtype == "float32" else value.to(self._dtypes[dtype]).to(self._torch.float32)

    def constant(self, value: float, dtype: str = "float32") -> float:
        return _round_number(value, dtype)

    def shape(self, value: Value) -> tuple[int, ...]:
        return tuple(value.shape)

    def dtype(self, value: Value) -> str:
        return str(self._names[value.dtype])

    def zeros(self, like: Value, shape: tuple[int, ...], dtype: str) -> Value:
        return self._torch.zeros(shape, dtype=self._dtypes[dtype], device=like.device)

    def sum(self, value: Value) -> Value:
        return value.sum()

    def mean(self, value: Value, axes: tuple[int, ...], keepdims: bool = False) -> Value:
        if not axes:
            return value
        count = math.prod(value.shape[axis] for axis in axes)
        # A tensor as divisor: CUDA multiplies by the reciprocal of a Python number.
        return value.sum(axes, keepdim=keepdims) / value.new_full((), count)

    def expand(self, value: Value, axes: tuple[int, ...]) -> Value:
        return value.reshape(_expanded_shape(tuple(value.shape), axes))

    def sqrt(self, value: Value) -> Value:
        return value.sqrt()

    def power(self, value: Value, exponent: float) -> Value:
        return value.pow(exponent)

    def maximum(self, left: Value, right: Value) -> Value:
        return self._torch.maximum(left, self._like(left, right))

    def minimum(self, left: Value, right: Value) -> Value:
        return self._torch.minimum(left, self._like(left, right))

    def keep_nan(self, new: Value, old: Value) -> Value:
        return self._torch.where(new.isnan(), old, new)

    def exponential(self, base: float, exponent: Value) -> Value:
        return self._torch.pow(base, exponent)

    def lerp(self, old: Value, new: Value, weight: Value) -> Value:
        return self._torch.lerp(old, new, weight.to(old.device))

    def absolute(self, value: Value) -> Value:
        return value.abs()

    def sign(self, value: Value) -> Value:
        return value.sign()

    def floor(self, value: Value) -> Value:
        return value.floor()

    def largest(self, value: Value, axis: int) -> Value:
        return value.amax(axis, keepdim=True)

    def if_greater(self, left: Value, right: Value, then: Value, otherwise: Value) -> Value:
        return self._torch.where(left > right, then, otherwise)

    def sequential_sum(self, value: Value, dtype: str) -> Value:
        total = value.new_zeros(())
        for term in value.reshape(-1):
            total = self.rounded(total + term, dtype)
        return total

    def _like(self, left: Value, right: Value) -> Value:
        return right if isinstance(right, self._torch.Tensor) else left.new_full((), right)


class JaxBackend:
    """JAX, one jitted computation per step."""

    name = "jax"
    compiles = True

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self._jax, self._jnp = jax, jnp

    def asarray(self, array: Array) -> Value:
        return self._jnp.asarray(array)

    def numpy(self, value: Value) -> Array:
        return np.asarray(value)

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return self._jax.jit(step)  # type: ignore[no-any-return]

    def widen(self, value: Value) -> Value:
        return self._jnp.asarray(value).astype(self._jnp.float32)

    def narrow(self, value: Value, dtype: str) -> Value:
        return self.rounded(value, dtype).astype(dtype)

    def rounded(self, value: Value, dtype: str) -> Value:
        if dtype == "float32":
            return value
        # XLA may drop a pair of casts; it never drops reduce_precision.
        info = self._jnp.finfo(dtype)
        return self._jax.lax.reduce_precision(value, exponent_bits=info.nexp, mantissa_bits=info.nmant)

    def constant(self, value: float, dtype: str = "float32") -> float:
        return _round_number(value, dtype)

    def shape(self, value: Value) -> tuple[int, ...]:
        return tuple(value.shape)

    def dtype(self, value: Value) -> str:
        return str(value.dtype.name)

    def zeros(self, like: Value, shape: tuple[int, ...], dtype: str) -> Value:
        return self._jnp.zeros(shape, dtype)

    def sum(self, value: Value) -> Value:
        return self._jnp.sum(value)

    def mean(self, value: Value, axes: tuple[int, ...], keepdims: bool = False) -> Value:
        return self._jnp.mean(value, axis=axes, keepdims=keepdims) if axes else value

    def expand(self, value: Value, axes: tuple[int, ...]) -> Value:
        return value.reshape(_expanded_shape(tuple(value.shape), axes))

    def sqrt(self, value: Value) -> Value:
        return self._jnp.sqrt(value)

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

    def lerp(self, old: Value, new: Value, weight: Value) -> Value:
        return old + weight * (new - old)

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


ORACLE = NumpyBackend("float64", "float64")
"""The same mathematics in float64, without the roundings on the way."""

_BACKENDS: dict[str, Callable[[], Backend]] = {
    "numpy": NumpyBackend,
    "torch": TorchBackend,
    "jax": JaxBackend,
}
BACKEND_NAMES = tuple(_BACKENDS)


@cache
def backend(name: str) -> Backend:
    """Returns a backend by name, importing its framework.

    Raises:
        NotFoundError: No such backend.
        MissingExtraError: The framework isn't installed.
    """
    if name not in _BACKENDS:
        raise NotFoundError("There is no such backend.", expected=", ".join(_BACKENDS), found=name)
    if name in ("torch", "jax") and importlib.util.find_spec(name) is None:
        raise MissingExtraError(
            f"The backend {name} isn't installed.", remedy=f"pip install 'statekit[{name}]'"
        )
    return _BACKENDS[name]()
