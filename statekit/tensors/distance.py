"""How far two tensors of one shape are apart: in bits, in units in the last place, and relative to their size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.pipeline import ahead, passed
from statekit.tensors.tensor import (
    BLOCK_BYTES,
    Array,
    DType,
    Index,
    Tensor,
    blocks,
    common,
    float_info,
    nbytes,
    whole,
)
from statekit.tensors.tree import report_json


@dataclass(frozen=True)
class Distance:
    """How far a tensor is from another, which is taken for the right one.

    Attributes:
        size: Elements that were compared.
        unequal: Elements whose bits differ; of another dtype, whose values do.
        ulps: Largest difference in units in the last place of the right one's dtype.
        largest: Largest difference; inf where one is NaN and the other isn't.
        relative: Largest difference over the largest magnitude of the right one's block in which it lies.
        first: Index of the first element that differs; None if none does.
        is_rounding: Whether the tensor is the right one, rounded to its own dtype.
    """

    size: int = 0
    unequal: int = 0
    ulps: float = 0.0
    largest: float = 0.0
    relative: float = 0.0
    first: tuple[int, ...] | None = None
    is_rounding: bool = True

    def __str__(self) -> str:
        parts = [f"{self.unequal} of {self.size} elements differ"]
        if self.ulps:
            parts.append(f"by up to {self.ulps:.3g} ULP, {self.relative:.3g} of the largest value")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Returns the distance as plain data; what isn't finite becomes a string."""
        numbers = {name: getattr(self, name) for name in ("ulps", "largest", "relative")}
        return {
            "size": self.size,
            "unequal": self.unequal,
            **report_json(numbers),
            "first": None if self.first is None else list(self.first),
            "is_rounding": self.is_rounding,
        }


def distance(right: Tensor, other: Tensor, parts: Sequence[Index] | None = None) -> Distance:
    """Returns how far a tensor is from another of the same shape, reading both block by block.

    Args:
        right: What is taken for the right one: its dtype sets the unit in the last place.
        other: The other.
        parts: The blocks that are compared, apart from each other; everything if None.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> one, two = np.float32([1, 2, 4]), np.float32([1, 2, 5])
        >>> print(distance(in_memory(one), in_memory(two)))
        1 of 3 elements differ, by up to 2.1e+06 ULP, 0.25 of the largest value
    """
    indexes = (whole(right.shape),) if parts is None else parts

    def read() -> Iterator[tuple[Index, Array, Array]]:
        for block in blocks(right):
            for part in indexes:
                if (index := common(block, part)) is not None:
                    yield index, right.read(index), other.read(index)

    pairs, total = passed(read()), Distance()
    for index, wanted, actual in ahead(pairs) if nbytes(right) > BLOCK_BYTES else pairs:
        total = _joined(total, _of_block(wanted, actual, index))
    return total


def _of_block(right: Array, other: Array, index: Index) -> Distance:
    if right.dtype == other.dtype:
        bits = _bits(right) != _bits(other)
        if not bits.any():
            return Distance(right.size)
    actual, wanted = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (other, right))
    apart = gap(actual, wanted)
    unequal = bits if right.dtype == other.dtype else apart > 0
    if not unequal.any():
        return Distance(right.size)
    with np.errstate(all="ignore"):
        rounded = right.astype(other.dtype)
        sizes = np.abs(wanted)
        scale = float(np.max(np.where(np.isfinite(sizes), sizes, 0.0)))
        largest = float(np.max(apart))
        counts = 0.0 if right.dtype.kind in "bc" else float(np.max(over(apart, ulp(wanted, right.dtype))))
    place = np.argwhere(unequal)[0] if unequal.ndim else ()
    return Distance(
        right.size,
        int(np.count_nonzero(unequal)),
        counts,
        largest,
        0.0 if largest == 0 else largest / scale if scale else float("inf"),
        tuple(int(i) + cut.start for i, cut in zip(place, index, strict=True)),
        bool(np.array_equal(_bits(rounded), _bits(other))),
    )


def _joined(first: Distance, more: Distance) -> Distance:
    return Distance(
        first.size + more.size,
        first.unequal + more.unequal,
        max(first.ulps, more.ulps),
        max(first.largest, more.largest),
        max(first.relative, more.relative),
        more.first if first.first is None else first.first,
        first.is_rounding and more.is_rounding,
    )


def _bits(values: Array) -> Array:
    """Returns the values as numbers whose equality is that of the bits."""
    if values.dtype.kind == "c":
        return values
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").reshape(values.shape)


def gap(mine: Array, theirs: Array) -> Array:
    """Returns how far float64 values are apart: 0 where both are NaN or the same infinity, inf where one is NaN."""
    with np.errstate(invalid="ignore"):
        same = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
        apart = np.where(same, 0.0, np.abs(mine - theirs))
        return np.where(np.isnan(apart), np.inf, apart)


def ulp(value: Array, dtype: DType) -> Array:
    """Returns the unit in the last place of float64 values as those of a dtype: 1 of integers."""
    if dtype.kind in "iu":
        return np.ones_like(value)
    info = float_info(dtype)
    magnitude = np.nan_to_num(np.abs(value), nan=0.0, posinf=float(info.max))
    exponent = np.floor(np.log2(np.maximum(magnitude, float(info.smallest_normal))))
    return np.asarray(np.exp2(exponent - info.nmant))


def over(top: Array, bottom: Array) -> Array:
    """Returns a quotient, element by element; 0 of 0, whatever it is divided by."""
    return np.where(top == 0, 0.0, top / bottom)
