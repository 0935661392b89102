"""The errors of tensors that a conversion rounds because the user asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from statekit.tensors.quantized import Codes, quantization_error
from statekit.tensors.tensor import Tensor, blocks
from statekit.tensors.views import Narrowed, Scaled


@dataclass(frozen=True)
class Measured:
    """The errors of tensors that a conversion rounds because the user asked for it.

    Attributes:
        asked: The operation: `narrowed`, `scaled` or `quantized`.
        values: How many values went through it.
        rounded: How many of them came out as other numbers.
        largest: The largest difference among those that stayed finite and didn't become 0, relative to the exact value.
        lost: How many became infinite, or 0.
    """

    asked: str
    values: int = 0
    rounded: int = 0
    largest: float = 0.0
    lost: int = 0

    def __str__(self) -> str:
        sentence = f"{self.asked}: {self.rounded} of {self.values} values are other numbers"
        whose = "their block's largest" if self.asked == "quantized" else "themselves"
        largest = f", by up to {self.largest:.3g} of {whose}" if self.largest else ""
        return f"{sentence}{largest}{f'; {self.lost} became infinite or 0' if self.lost else ''}"

    def and_block(self, block: Any, exact: Any) -> Measured:
        """Returns it with a block of values beside what they would be exactly, in float64."""
        values = block.astype(np.float64)
        other = values != exact
        other &= ~(np.isnan(values) & np.isnan(exact))
        lost = other & (np.isinf(values) | (values == 0))
        near = other & ~lost
        largest = float(np.max(np.abs(values[near] / exact[near] - 1))) if near.any() else 0.0
        return replace(
            self,
            values=self.values + values.size,
            rounded=self.rounded + int(other.sum()),
            largest=max(self.largest, largest),
            lost=self.lost + int(lost.sum()),
        )

    def and_quantized(self, codes: Codes) -> Measured:
        """Returns it with a tensor that was quantized; the largest difference is relative to its block's scale."""
        count, changed, largest = quantization_error(codes)
        return replace(
            self,
            values=self.values + count,
            rounded=self.rounded + changed,
            largest=max(self.largest, largest),
        )


def measured_in(tensors: Iterable[Tensor]) -> tuple[Measured, ...]:
    """Reads what changes rounded in some tensors, and returns how far it is off; nothing else is read."""
    measures: dict[str, Measured] = {}
    for rounded in {id(rounded): rounded for tensor in tensors for rounded in _rounded_in(tensor)}.values():
        if isinstance(rounded, Codes):
            measures["quantized"] = measures.get("quantized", Measured("quantized")).and_quantized(rounded)
            continue
        name, factor = ("scaled", rounded.factor) if isinstance(rounded, Scaled) else ("narrowed", 1.0)
        so_far = measures.get(name, Measured(name))
        for index in blocks(rounded):
            exact = rounded.tensor.read(index).astype(np.float64) * factor
            so_far = so_far.and_block(rounded.read(index), exact)
        measures[name] = so_far
    return tuple(measures.values())


def _rounded_in(tensor: Any) -> Iterator[Narrowed | Scaled | Codes]:
    """Yields the roundings that the user asked for among the operations that make a tensor."""
    if isinstance(tensor, (Narrowed, Scaled, Codes)):
        yield tensor
    if is_dataclass(tensor) and not callable(tensor):
        for field in fields(tensor):
            part = getattr(tensor, field.name)
            for inner in part if isinstance(part, (list, tuple)) else (part,):
                yield from _rounded_in(inner)
