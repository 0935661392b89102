"""The array namespace of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from statekit.arrays.backend import Backend, Value
from statekit.errors import UsageError
from statekit.tensors.tensor import DTYPES, Array

_BITS = {name: f"int{8 * dtype.itemsize}" for name, dtype in DTYPES.items() if dtype.isbuiltin != 1}
"""What NumPy itself hasn't -> integers of the same bits, as which it goes to and from PyTorch."""


class TorchBackend(Backend):
    """PyTorch, eager, on whatever device the tensors live.

    Args:
        device: Where arrays are taken to.

    Raises:
        UsageError: There is no such device.
    """

    name = "torch"
    contracts = False
    sqrt_units = 2.0  # MKL's, on CPUs: one element in 150 isn't correctly rounded

    def __init__(self, device: str = "cpu") -> None:
        import torch

        self._torch = torch
        try:
            torch.zeros(1, device=device).cpu()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise UsageError(
                "PyTorch reaches no such device here.",
                expected="cpu, or a device that torch sees",
                found=device,
                remedy=str(error).splitlines()[0],
            ) from error
        self._device = device
        self._dtypes = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
        self._names = {dtype: name for name, dtype in self._dtypes.items()}

    @property
    def device(self) -> str:
        return self._device

    def asarray(self, array: Array) -> Value:
        bits = _BITS.get(array.dtype.name)
        if bits is None:
            return self._torch.from_numpy(np.array(array)).to(self._device)
        bytewise = self._torch.from_numpy(np.array(array.view(bits))).to(self._device)
        return bytewise.view(self._dtypes[array.dtype.name])

    def numpy(self, value: Value) -> Array:
        cpu, name = value.detach().cpu(), self.dtype(value)
        if name not in _BITS:
            return np.asarray(cpu.numpy())
        return np.asarray(cpu.view(self._dtypes[_BITS[name]]).numpy()).view(DTYPES[name])

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

    def dtype(self, value: Value) -> str:
        return str(self._names[value.dtype])

    def zeros(self, like: Value, shape: tuple[int, ...], dtype: str) -> Value:
        return like.new_zeros(shape, dtype=self._dtypes[dtype])  # of `like`'s kind: sharded if it is

    def sum(self, *values: Value) -> Value:
        return sum(value.sum() for value in values)

    def norm(self, value: Value) -> Value:
        peak = value.abs().max() if value.numel() else value.new_zeros(())
        scaled = value / self._torch.where(peak > 0, peak, 1.0)
        return self._torch.where(peak < math.inf, peak * (scaled * scaled).sum().sqrt(), peak)

    def mean(self, value: Value, axes: tuple[int, ...], keepdims: bool = False) -> Value:
        if not axes:
            return value
        count = math.prod(value.shape[axis] for axis in axes)
        # A tensor as divisor: CUDA multiplies by the reciprocal of a Python number.
        return value.sum(axes, keepdim=keepdims) / value.new_full((), count)

    def permuted(self, value: Value, axes: tuple[int, ...]) -> Value:
        return value if axes == tuple(range(len(axes))) else value.permute(axes)

    def matmul(self, left: Value, right: Value) -> Value:
        return left @ right

    def sqrt(self, value: Value) -> Value:
        return math.sqrt(value) if isinstance(value, float) else value.sqrt()

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

    def one_minus_power(self, base: float, exponent: Value) -> Value:
        if isinstance(exponent, int):
            return 1.0 - base**exponent
        return -self._torch.expm1(self.widen(exponent) * math.log(base))

    def where(self, condition: Value, then: Value, otherwise: Value) -> Value:
        if isinstance(condition, bool):
            return then if condition else otherwise
        return self._torch.where(condition, then, otherwise)

    def set_row(self, value: Value, row: Value, new: Value) -> Value:
        changed = value.clone()
        changed[row] = new
        return changed

    def stack(self, values: Sequence[Value]) -> Value:
        return self._torch.stack(list(values))

    def unstack(self, value: Value) -> Sequence[Value]:
        rows: Sequence[Value] = value.unbind()
        return rows

    def batched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._torch.vmap(function)

    def order_statistic(self, value: Value, place: int) -> Value:
        return value.sort().values[place]

    def _like(self, left: Value, right: Value) -> Value:
        return right if isinstance(right, self._torch.Tensor) else left.new_full((), right)
