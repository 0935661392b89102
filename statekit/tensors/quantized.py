"""Tensors of few bits: codes, a scale for each block of the flattened values, and the levels that codes stand for.

value[j] = levels[code[j]] * scale[j // block] in float32, rounded once: what the optimizer's next update starts from.
Blocks run over the flattened tensor, and the last may be short. Two codes of 4 bits share a byte, the first of them in
the high half. A code without levels is a float8 number itself.

Source: bitsandbytes 0.50, bitsandbytes/functional.py, `dequantize_blockwise`; torchao 0.18,
torchao/optim/quant_utils.py and subclass_{8bit,4bit,fp8}.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NotRequired, TypedDict

import numpy as np

from statekit.errors import StateError
from statekit.tensors.tensor import (
    Array,
    DType,
    Index,
    Shape,
    Tensor,
    dtype_named,
    in_memory,
    index_shape,
    nbytes,
    normal_index,
    whole,
    within,
)
from statekit.tensors.typed import Natural, Positive

FLOAT8 = dtype_named("float8_e4m3fn")
FLOAT32 = np.dtype(np.float32)
SMALLEST_SCALE = 1e-12
"""The least scale of a block, of zeros alone. Source: torchao/optim/quant_utils.py, `scale_tensor`."""
_LARGEST_FLOAT8 = 448.0
_LARGEST_BLOCK = 2**31


class QuantizedParts(TypedDict):
    """A quantized tensor in a tree: its parts, the shape of its values, and how many share a scale."""

    codes: Tensor
    scale: Tensor
    levels: NotRequired[Tensor]
    shape: list[Natural]
    block: Positive


@dataclass(frozen=True)
class Quantized:
    """A tensor whose float32 values lie in few bits.

    Attributes:
        codes: uint8 of the tensor's shape; of 4 bits uint8 of shape (n / 2,); or float8_e4m3fn of the tensor's shape.
        scale: float32, shape (blocks,), or (rows, blocks) where each row of the first axis has blocks of its own.
        levels: float32, shape (2**bits,), in ascending order; None if codes are float8.
        shape: The shape of the values.
        block: How many values share a scale.

    Raises:
        StateError: The parts don't fit each other.

    Example:
        >>> eighths = in_memory(np.arange(-8, 8, dtype=np.float32) / 8)
        >>> codes, scale = in_memory(np.uint8([0x0C, 0x99])), in_memory(np.float32([10, 2]))
        >>> Quantized(codes, scale, eighths, (2, 2), 2).read().tolist()
        [[-10.0, 5.0], [0.25, 0.25]]
    """

    codes: Tensor
    scale: Tensor
    levels: Tensor | None
    shape: Shape
    block: int

    def __post_init__(self) -> None:
        scales, count = self._scales, math.prod(self.shape)
        is_packed = self.bits == 4
        codes = (count // 2,) if is_packed else self.shape
        is_whole = not (is_packed and count % 2)
        code = FLOAT8 if self.levels is None else np.uint8
        levels = None if self.levels is None else (self.levels.shape, self.levels.dtype)
        fits = {
            "codes": is_whole and (self.codes.shape, self.codes.dtype) == (codes, code),
            "scale": (self.scale.shape, self.scale.dtype) == (scales, FLOAT32),
            "levels": levels in (None, ((2**self.bits,), FLOAT32)),
        }
        if wrong := [name for name, is_right in fits.items() if not is_right]:
            tensors = {"codes": self.codes, "scale": self.scale, "levels": self.levels}
            raise StateError(
                "The parts of a quantized tensor don't fit each other.",
                expected=f"parts of a tensor of shape {self.shape}, in blocks of {self.block}: {scales} scales",
                found=", ".join(
                    f"{name} {part.dtype} {part.shape}"
                    for name in wrong
                    if (part := tensors[name]) is not None
                ),
            )

    @property
    def _scales(self) -> Shape | None:
        """The shape that scales have; None where blocks or rows don't cut the values."""
        rows, count = self._rows, math.prod(self.shape)
        if rows < 1 or count % rows or not 0 < self.block <= _LARGEST_BLOCK:
            return None
        blocks = -(-(count // rows) // self.block)
        return (rows, blocks) if len(self.scale.shape) == 2 and self.shape else (blocks,)

    @cached_property
    def _rows(self) -> int:
        return self.scale.shape[0] if len(self.scale.shape) == 2 and self.shape else 1

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.levels is not None and self.levels.shape == (16,) else 8

    @property
    def kind(self) -> str:
        """What it is, in a few words."""
        code = "float8_e4m3fn" if self.levels is None else f"{self.bits} bits"
        return f"{code} in blocks of {self.block}"

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes, scales and levels."""
        return sum(nbytes(part) for part in (self.codes, self.scale, self.levels) if part is not None)

    @property
    def dtype(self) -> DType:
        """The dtype of the values: float32."""
        return FLOAT32

    @property
    def grain(self) -> Shape:
        """The cheapest block."""
        return self.shape if self.bits == 4 else self.codes.grain

    def read(self, index: Index | None = None) -> Array:
        """Reads a block of values, dequantized."""
        index = normal_index(index, self.shape)
        if 0 in index_shape(index):
            return np.empty(index_shape(index), FLOAT32)
        cover, first, end = _covering(self.shape, index)
        codes = self._codes(cover, first, end)
        if self.levels is None:
            values = codes.astype(FLOAT32)
        else:
            levels = self.levels.read()
            if levels.size < 256 and int(codes.max()) >= levels.size:
                raise StateError("A code has no level.", found=int(codes.max()))
            values = levels[codes]
        per_row = math.prod(self.shape) // self._rows
        places = np.arange(first, end)
        blocks = places // per_row * self.scale.shape[-1] + places % per_row // self.block
        low, high = int(blocks[0]), int(blocks[-1]) + 1
        scales = (
            self.scale.read().reshape(-1)[low:high]
            if self._rows > 1
            else self.scale.read((slice(low, high),))
        )
        with np.errstate(all="ignore"):  # a damaged scale makes infinite values, which doctor names
            values *= scales[blocks - low]
        return np.ascontiguousarray(values.reshape(index_shape(cover))[within(index, cover)])

    def _codes(self, cover: Index, first: int, end: int) -> Array:
        """Returns the codes of the values `first` to `end` of the flattened tensor."""
        if self.bits == 8:
            return self.codes.read(cover).reshape(-1)
        packed = self.codes.read((slice(first // 2, -(-end // 2)),))
        pairs = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
        return pairs[first % 2 :][: end - first]

    def as_tree(self) -> QuantizedParts:
        """Returns the tensor's parts as a tree."""
        parts: QuantizedParts = {
            "codes": self.codes,
            "scale": self.scale,
            "shape": list(self.shape),
            "block": self.block,
        }
        return parts if self.levels is None else {**parts, "levels": self.levels}

    @staticmethod
    def of_parts(parts: QuantizedParts) -> Quantized:
        """Returns the tensor of parts in a tree."""
        return Quantized(
            parts["codes"], parts["scale"], parts.get("levels"), tuple(parts["shape"]), parts["block"]
        )

    def to_json(self) -> dict[str, Any]:
        levels = {} if self.levels is None else {"levels": self.levels.to_json()}
        parts = {"codes": self.codes.to_json(), "scale": self.scale.to_json(), **levels}
        return {
            "op": "dequantized",
            "bits": self.bits,
            "block": self.block,
            "shape": list(self.shape),
            **parts,
        }


def quantized(tensor: Tensor, levels: Tensor | None, block: int) -> Quantized:
    """Returns a tensor in few bits: each value as the nearest level times its block's scale, ties upward.

    The scale is the block's largest absolute value, over 448 if codes are float8.

    Args:
        tensor: What to quantize, of any float dtype.
        levels: float32, of 256 or 16 levels in ascending order; None for float8.
        block: How many values share a scale.
    """
    scale = _Scales(tensor, block, levels is None)
    return Quantized(Codes(tensor, scale, levels, block), scale, levels, tensor.shape, block)


@dataclass(frozen=True)
class _Scales:
    """The scale of each block of a tensor's flattened values, float32."""

    tensor: Tensor
    block: int
    is_float8: bool

    @property
    def shape(self) -> Shape:
        return (-(-math.prod(self.tensor.shape) // self.block),)

    @property
    def dtype(self) -> DType:
        return FLOAT32

    @property
    def grain(self) -> Shape:
        return self.shape

    def read(self, index: Index | None = None) -> Array:
        (cut,) = normal_index(index, self.shape)
        count = math.prod(self.tensor.shape)
        values = _flat(self.tensor, cut.start * self.block, min(cut.stop * self.block, count))
        starts = np.arange(0, values.size, self.block)
        largest = np.maximum.reduceat(np.abs(values), starts) if values.size else np.empty(0, FLOAT32)
        scale = np.maximum(largest, FLOAT32.type(SMALLEST_SCALE))
        return scale / FLOAT32.type(_LARGEST_FLOAT8) if self.is_float8 else scale

    def to_json(self) -> dict[str, Any]:
        return {"op": "quantized", "part": "scale", "block": self.block, "source": self.tensor.to_json()}


@dataclass(frozen=True)
class Codes:
    """The codes of a tensor's values; two of 4 bits share a byte."""

    tensor: Tensor
    scale: _Scales
    levels: Tensor | None
    block: int

    @property
    def _packed(self) -> bool:
        return self.levels is not None and self.levels.shape == (16,)

    @property
    def shape(self) -> Shape:
        return (math.prod(self.tensor.shape) // 2,) if self._packed else self.tensor.shape

    @property
    def dtype(self) -> DType:
        return FLOAT8 if self.levels is None else np.dtype(np.uint8)

    @property
    def grain(self) -> Shape:
        return self.shape if self._packed else self.tensor.grain

    def read(self, index: Index | None = None) -> Array:
        index = normal_index(index, self.shape)
        if 0 in index_shape(index):
            return np.empty(index_shape(index), self.dtype)
        if self._packed:
            codes = self._flat_codes(2 * index[0].start, 2 * index[0].stop)
            return codes[::2] << 4 | codes[1::2]
        cover, first, end = _covering(self.shape, index)
        codes = self._flat_codes(first, end).reshape(index_shape(cover))
        return np.ascontiguousarray(codes[within(index, cover)])

    def _flat_codes(self, first: int, end: int) -> Array:
        blocks = slice(first // self.block, -(-end // self.block))
        values = _flat(self.tensor, first, end)
        scales = self.scale.read((blocks,))[np.arange(first, end) // self.block - blocks.start]
        with np.errstate(all="ignore"):  # NaN stays NaN, by its block's scale
            values = values / scales
            if self.levels is None:
                return values.astype(FLOAT8)
            levels = self.levels.read()
            low = np.clip(np.searchsorted(levels, values, "right") - 1, 0, None).astype(np.intp)
            high = np.minimum(low + 1, levels.size - 1)
            up = values - levels[low] >= (levels[high] - levels[low]) * FLOAT32.type(0.5)
        return np.where(up, high, low).astype(np.uint8)

    def to_json(self) -> dict[str, Any]:
        bits = 4 if self._packed else 8
        source = self.tensor.to_json()
        return {"op": "quantized", "part": "codes", "bits": bits, "block": self.block, "source": source}


def quantization_error(codes: Codes) -> tuple[int, int, float]:
    """Returns how many values were quantized, how many became others, and the largest error by its block's scale."""
    source, count = codes.tensor, math.prod(codes.tensor.shape)
    low = Quantized(codes, codes.scale, codes.levels, source.shape, codes.block)
    step = codes.block * max(1, 2**20 // codes.block)
    changed, largest = 0, 0.0
    for first in range(0, count, step):
        end = min(first + step, count)
        scales = codes.scale.read((slice(first // codes.block, -(-end // codes.block)),)).astype(np.float64)
        scales *= _LARGEST_FLOAT8 if codes.levels is None else 1.0
        off = np.abs(_flat(low, first, end).astype(np.float64) - _flat(source, first, end))
        changed += int((off != 0).sum())
        by_block = np.maximum.reduceat(off, np.arange(0, off.size, codes.block)) / scales
        largest = max(largest, float(by_block.max()))
    return count, changed, largest


def _covering(shape: Shape, index: Index) -> tuple[Index, int, int]:
    """Returns the block of whole rows around a block, and where it begins and ends in the flattened tensor."""
    cover: list[slice] = []
    first = 0
    for axis, cut in enumerate(index):
        row = math.prod(shape[axis + 1 :])
        cover.append(cut)
        first += cut.start * row
        if cut.stop - cut.start > 1:
            cover += whole(shape[axis + 1 :])
            break
    return tuple(cover), first, first + math.prod(index_shape(tuple(cover)))


def _flat(tensor: Tensor, first: int, end: int) -> Array:
    """Returns the values `first` to `end` of a flattened tensor, in float32."""
    cover: list[slice] = []
    base = 0
    for axis in range(len(tensor.shape)):
        row = math.prod(tensor.shape[axis + 1 :])
        low, high = (first - base) // row, -(-(end - base) // row)
        cover.append(slice(low, high))
        base += low * row
        if high - low > 1:
            cover += whole(tensor.shape[axis + 1 :])
            break
    return tensor.read(tuple(cover)).reshape(-1)[first - base : end - base].astype(FLOAT32)


@cache
def dynamic_levels(bits: int, signed: bool) -> Tensor:
    """Returns the levels of a dynamic map: decades of 1e-7 to 1, each with twice as many levels as the one below.

    Source: bitsandbytes/functional.py, `create_dynamic_map`; torchao/optim/quant_utils.py, the same for fewer bits.

    Args:
        bits: 8 or 4.
        signed: Whether values below 0 have levels.
    """
    decades = 7 if bits == 8 else 3
    levels: list[float] = []
    for i in range(decades):
        steps = 2 ** (i + bits - 1 - decades + (not signed))
        edges = _linspace(0.1, 1.0, steps + 1)
        means = (edges[:-1] + edges[1:]) / FLOAT32.type(2)
        levels += (FLOAT32.type(10.0 ** (i + 1 - decades)) * means).tolist()
    levels += [-level for level in levels] if signed else []
    return in_memory(np.sort(np.array([*levels, 0.0, 1.0], np.float32)), "levels")


@cache
def linear_levels() -> Tensor:
    """Returns 1/16, 2/16, ... 1: the levels of unsigned codes of 4 bits, none of which is 0.

    Source: torchao/optim/subclass_4bit.py, `get_qmap_unsigned`.
    """
    return in_memory(_linspace(0.0, 1.0, 17)[1:], "levels")


def _linspace(low: float, high: float, count: int) -> Array:
    """Returns evenly spaced float32 numbers, made from both ends to the middle, each sum rounded once.

    Source: pytorch/pytorch aten/src/ATen/native/cpu/RangeFactoriesKernel.cpp, `linspace_kernel`, with fused products.
    """
    begin, end = np.float64(FLOAT32.type(low)), np.float64(FLOAT32.type(high))
    step = np.float64(FLOAT32.type((FLOAT32.type(high) - FLOAT32.type(low)) / FLOAT32.type(count - 1)))
    places = np.arange(count, dtype=np.float64)
    return np.where(places < count // 2, begin + step * places, end - step * places[::-1]).astype(FLOAT32)
