"""Tensors made of others, read when they are: other axes, slices, stacks, means, pieces, powers, multiples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from statekit.errors import StateError, UsageError
from statekit.tensors.tensor import (
    BLOCK_BYTES,
    DTYPES,
    Array,
    Cast,
    DType,
    Index,
    OfOne,
    OfSeveral,
    Shape,
    Tensor,
    fill,
    index_shape,
    normal_index,
    parts_of,
    positions,
    rounded,
    row_major,
    widens,
)


@dataclass(frozen=True)
class Squeezed(OfOne):
    """The same values with axes of length 1 put in or taken out: shape (4, 1) as (4,), or the other way round.

    Raises:
        UsageError: The shapes differ in more than axes of length 1.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Squeezed(in_memory(np.ones((4, 1))), (4,)).read().shape
        (4,)
    """

    tensor: Tensor
    shape: Shape

    def __post_init__(self) -> None:
        if [n for n in self.shape if n != 1] != [n for n in self.tensor.shape if n != 1]:
            raise UsageError(
                "Shapes differ in more than axes of length 1.", expected=self.tensor.shape, found=self.shape
            )

    @property
    def grain(self) -> Shape:
        long = iter(g for g, n in zip(self.tensor.grain, self.tensor.shape, strict=True) if n != 1)
        return tuple(1 if n == 1 else next(long) for n in self.shape)

    @property
    def parts(self) -> tuple[Index, ...] | None:
        """The blocks that this process has, in the new axes, where the values are spread over several; else None."""
        parts = parts_of(self.tensor)
        if parts is None:
            return None
        return tuple(self._moved(part) for part in parts if 0 not in index_shape(part))

    def _moved(self, part: Index) -> Index:
        long = iter(cut for cut, n in zip(part, self.tensor.shape, strict=True) if n != 1)
        return tuple(slice(0, 1) if n == 1 else next(long) for n in self.shape)

    def read(self, index: Index | None = None) -> Array:
        index = normal_index(index, self.shape)
        if 0 in index_shape(index):
            return np.empty(index_shape(index), self.dtype)
        long = iter(part for part, n in zip(index, self.shape, strict=True) if n != 1)
        inner = tuple(slice(0, 1) if n == 1 else next(long) for n in self.tensor.shape)
        return row_major(self.tensor.read(inner)).reshape(index_shape(index))

    def to_json(self) -> dict[str, Any]:
        return {"op": "reaxed", "source": self.tensor.to_json(), "shape": list(self.shape)}


@dataclass(frozen=True)
class _WithoutAxis(OfOne):
    """What a tensor becomes that loses one of its axes."""

    tensor: Tensor
    axis: int

    @property
    def shape(self) -> Shape:
        return (*self.tensor.shape[: self.axis], *self.tensor.shape[self.axis + 1 :])

    @property
    def grain(self) -> Shape:
        """The cheapest block, without the axis."""
        return (*self.tensor.grain[: self.axis], *self.tensor.grain[self.axis + 1 :])


@dataclass(frozen=True)
class Slice(_WithoutAxis):
    """What stands at one place of an axis, without that axis.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Slice(in_memory(np.arange(6).reshape(2, 3)), 0, 1).read().tolist()
        [3, 4, 5]
    """

    place: int

    def read(self, index: Index | None = None) -> Array:
        index = normal_index(index, self.shape)
        inner = (*index[: self.axis], slice(self.place, self.place + 1), *index[self.axis :])
        return row_major(self.tensor.read(inner)).reshape(index_shape(index))

    def to_json(self) -> dict[str, Any]:
        return {"op": "member", "source": self.tensor.to_json(), "axis": self.axis, "place": self.place}


@dataclass(frozen=True)
class Copies(_WithoutAxis):
    """A tensor whose copies lie along an axis. Every block is read of all of them, and has to be the same in each.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Copies(in_memory(np.array([[1, 2], [1, 2]])), 0, "w").read().tolist()
        [1, 2]
    """

    name: str

    def read(self, index: Index | None = None) -> Array:
        """Reads a block of all copies.

        Raises:
            StateError: They differ.
        """
        first, *others = (Slice(self.tensor, self.axis, i) for i in range(self.tensor.shape[self.axis]))
        block = first.read(index)
        for i, other in enumerate(others, 1):
            if other.read(index).tobytes() != block.tobytes():
                raise StateError(
                    "The copies of a tensor differ.",
                    place=self.name,
                    expected="equal copies along the first axis, as jax.pmap keeps one for each device",
                    found=f"copy {i} is another than copy 0",
                    remedy="save one network of several (jax.vmap): jax.tree.map(lambda leaf: leaf[0], state); "
                    "or the state after its devices were synchronised",
                )
        return block

    def to_json(self) -> dict[str, Any]:
        return {"op": "copies", "source": self.tensor.to_json(), "axis": self.axis}


@dataclass(frozen=True)
class Stack(OfSeveral):
    """Tensors of one shape and dtype along a new axis; undoes `Slice`."""

    tensors: Sequence[Tensor]
    axis: int

    @cached_property
    def shape(self) -> Shape:
        inner = self.tensors[0].shape
        return (*inner[: self.axis], len(self.tensors), *inner[self.axis :])

    @property
    def grain(self) -> Shape:
        inner = self.tensors[0].grain
        return (*inner[: self.axis], 1, *inner[self.axis :])

    def read(self, index: Index | None = None) -> Array:
        index = normal_index(index, self.shape)
        inner = (*index[: self.axis], *index[self.axis + 1 :])
        block = np.empty(index_shape(index), self.dtype)
        head = (slice(None),) * self.axis
        for place, tensor in enumerate(self.tensors[index[self.axis]]):
            # A view in any case; at a place of an axis that is the only one, it would be a number.
            fill(block[(*head, slice(place, place + 1))].squeeze(self.axis), tensor.read(inner))
        return block

    def to_json(self) -> dict[str, Any]:
        return {"op": "stack", "sources": [tensor.to_json() for tensor in self.tensors], "axis": self.axis}


@dataclass(frozen=True)
class Permuted(OfOne):
    """A tensor with its axes in another order: the new axis i is the tensor's axis `order[i]`.

    Raises:
        UsageError: `order` doesn't name each axis once.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Permuted(in_memory(np.arange(6).reshape(2, 3)), (1, 0)).read().tolist()
        [[0, 3], [1, 4], [2, 5]]
    """

    tensor: Tensor
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.tensor.shape))):
            raise UsageError(
                "An order of axes doesn't name each once.",
                expected=f"{len(self.tensor.shape)} axes",
                found=self.order,
            )

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape[i] for i in self.order)

    @property
    def grain(self) -> Shape:
        """The cheapest block, in the new order."""
        return tuple(self.tensor.grain[i] for i in self.order)

    def read(self, index: Index | None = None) -> Array:
        return row_major(self.scattered(normal_index(index, self.shape)))

    def scattered(self, index: Index) -> Array:
        """Reads the block of a normal index as it lies in memory: a view of other strides."""
        inner = tuple(index[self.order.index(i)] for i in range(len(self.order)))
        return self.tensor.read(inner).transpose(self.order)

    def to_json(self) -> dict[str, Any]:
        return {"op": "permuted", "source": self.tensor.to_json(), "order": list(self.order)}


@dataclass(frozen=True)
class Merged(OfOne):
    """A tensor whose axes `axis` and `axis + 1` are one, the second running faster; undoes `Parted`.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Merged(in_memory(np.arange(6).reshape(2, 3)), 0).read((slice(2, 5),)).tolist()
        [2, 3, 4]
    """

    tensor: Tensor
    axis: int

    @property
    def shape(self) -> Shape:
        return self._joined(self.tensor.shape)

    @property
    def grain(self) -> Shape:
        """The cheapest block: whole runs of the second axis."""
        grain, at = self.tensor.grain, self.axis
        return self._joined((*grain[: at + 1], self.tensor.shape[at + 1], *grain[at + 2 :]))

    def _joined(self, sizes: Shape) -> Shape:
        at = self.axis
        return (*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :])

    def read(self, index: Index | None = None) -> Array:
        """Reads a block: of the first of the two axes all that it reaches into, which is then cut."""
        index, at = normal_index(index, self.shape), self.axis
        wanted, run = index[at], self.tensor.shape[at + 1]
        if 0 in index_shape(index):
            return np.empty(index_shape(index), self.dtype)
        first, last = wanted.start // run, -(-wanted.stop // run)
        inner = (*index[:at], slice(first, last), slice(0, run), *index[at + 1 :])
        block = self.tensor.read(inner)
        block = block.reshape((*block.shape[:at], -1, *block.shape[at + 2 :]))
        cut = slice(wanted.start - first * run, wanted.stop - first * run)
        return row_major(block[(slice(None),) * at + (cut,)])

    def to_json(self) -> dict[str, Any]:
        return {"op": "merged", "source": self.tensor.to_json(), "axis": self.axis}


@dataclass(frozen=True)
class Parted(OfOne):
    """A tensor whose axis `axis` is two, of which the first has the length `outer`; undoes `Merged`.

    Raises:
        UsageError: The axis isn't a multiple of that.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Parted(in_memory(np.arange(6)), 0, 2).read().tolist()
        [[0, 1, 2], [3, 4, 5]]
    """

    tensor: Tensor
    axis: int
    outer: int

    def __post_init__(self) -> None:
        length = self.tensor.shape[self.axis]
        if self.outer < 1 or length % self.outer:
            raise UsageError(
                "An axis can't be parted so.", expected=f"a divisor of {length}", found=self.outer
            )

    @property
    def _run(self) -> int:
        return self.tensor.shape[self.axis] // self.outer

    @property
    def shape(self) -> Shape:
        sizes = self.tensor.shape
        return (*sizes[: self.axis], self.outer, self._run, *sizes[self.axis + 1 :])

    @property
    def grain(self) -> Shape:
        grain, run = self.tensor.grain, self._run
        length = grain[self.axis]
        return (*grain[: self.axis], max(1, length // max(run, 1)), min(length, run), *grain[self.axis + 1 :])

    def read(self, index: Index | None = None) -> Array:
        """Reads a block: all that the first of the two axes selects, which is then cut along the second."""
        index, at = normal_index(index, self.shape), self.axis
        if 0 in index_shape(index):
            return np.empty(index_shape(index), self.dtype)
        outer, run = index[at], self._run
        inner = (*index[:at], slice(outer.start * run, outer.stop * run), *index[at + 2 :])
        block = self.tensor.read(inner)
        block = block.reshape((*block.shape[:at], -1, run, *block.shape[at + 1 :]))
        return row_major(block[(slice(None),) * (at + 1) + (index[at + 1],)])

    def to_json(self) -> dict[str, Any]:
        return {"op": "parted", "source": self.tensor.to_json(), "axis": self.axis, "outer": self.outer}


@dataclass(frozen=True)
class Mean(_WithoutAxis):
    """The mean along one axis, summed in float64 and rounded once to the tensor's dtype.

    A second moment in full becomes a factored one's: both are linear in the squared gradients.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Mean(in_memory(np.array([[1.0, 2.0], [3.0, 6.0]], np.float32)), 0).read().tolist()
        [2.0, 4.0]
    """

    def read(self, index: Index | None = None) -> Array:
        """Reads a block: the tensor's blocks along the axis, one after the other."""
        index, length = normal_index(index, self.shape), self.tensor.shape[self.axis]
        total = np.zeros(index_shape(index), np.float64)
        # Bytes of each place of the axis.
        place_bytes = math.prod(index_shape(index)) * self.tensor.dtype.itemsize
        step = max(1, min(self.tensor.grain[self.axis], BLOCK_BYTES // max(1, place_bytes)))
        for start in range(0, length, step):
            along = slice(start, min(start + step, length))
            block = self.tensor.read((*index[: self.axis], along, *index[self.axis :]))
            total += block.sum(axis=self.axis, dtype=np.float64)
        with np.errstate(invalid="ignore"):  # the mean of nothing is NaN, as the optimizers have it
            return rounded(total / length, self.dtype)

    def to_json(self) -> dict[str, Any]:
        return {"op": "mean", "source": self.tensor.to_json(), "axis": self.axis}


def mean_over(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """Returns the mean over several axes."""
    for axis in sorted(axes, reverse=True):
        tensor = Mean(tensor, axis)
    return tensor


@dataclass(frozen=True)
class Segment:
    """Some values of a tensor of rank 1, one after the other."""

    tensor: Tensor
    start: int
    count: int


@dataclass(frozen=True)
class Concatenated:
    """Runs of flat tensors, one after the other, as one tensor in C order: a parameter that was cut over ranks.

    Raises:
        UsageError: The runs hold another number of values, other dtypes, or reach beyond their tensors.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> flat = in_memory(np.arange(6))
        >>> Concatenated((Segment(flat, 4, 2), Segment(flat, 0, 2)), (2, 2)).read().tolist()
        [[4, 5], [0, 1]]
    """

    runs: tuple[Segment, ...]
    shape: Shape

    def __post_init__(self) -> None:
        count = sum(run.count for run in self.runs)
        inside = all(r.start >= 0 and 0 <= r.count <= r.tensor.shape[0] - r.start for r in self.runs)
        if not self.runs or count != math.prod(self.shape) or not inside or len(self._dtypes()) != 1:
            raise UsageError(
                "Parts don't make up a tensor.",
                expected=f"{math.prod(self.shape)} values of one dtype for shape {self.shape}",
                found=f"{count} values of {', '.join(sorted(self._dtypes())) or 'nothing'}",
            )

    def _dtypes(self) -> set[str]:
        return {run.tensor.dtype.name for run in self.runs}

    @property
    def dtype(self) -> DType:
        return self.runs[0].tensor.dtype

    @property
    def grain(self) -> Shape:
        """The cheapest block: what lies together in memory does in the runs."""
        return self.shape

    def read(self, index: Index | None = None) -> Array:
        """Reads a block, in runs as long as the block has whole trailing axes."""
        index = normal_index(index, self.shape)
        out = np.empty(index_shape(index), self.dtype)
        if not out.size:
            return out
        axis = len(self.shape)
        while axis and index[axis - 1] == slice(0, self.shape[axis - 1]):
            axis -= 1
        outer, inner = index[: max(axis - 1, 0)], index[max(axis - 1, 0) :]
        count = math.prod(index_shape(inner))
        for place in positions([range(part.start, part.stop) for part in outer]):
            first = (*place, *(part.start for part in inner))
            start = sum(i * math.prod(self.shape[n + 1 :]) for n, i in enumerate(first))
            block = self._flat(start, count).reshape(index_shape(inner))
            out[tuple(i - part.start for i, part in zip(place, outer, strict=True))] = block
        return out

    def _flat(self, start: int, count: int) -> Array:
        parts, begin = [], 0
        for run in self.runs:
            low, high = max(start, begin), min(start + count, begin + run.count)
            if low < high:
                parts.append(run.tensor.read((slice(run.start + low - begin, run.start + high - begin),)))
            begin += run.count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def to_json(self) -> dict[str, Any]:
        runs = [{"op": "run", "source": r.tensor.to_json(), "span": [r.start, r.count]} for r in self.runs]
        return {"op": "joined", "sources": runs, "shape": list(self.shape)}


@dataclass(frozen=True)
class EachElement:
    """A tensor each element of which is computed from one element of another."""

    tensor: Tensor

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    @property
    def grain(self) -> Shape:
        """The tensor's cheapest block."""
        return self.tensor.grain


@dataclass(frozen=True)
class EighthRoot(EachElement):
    """What an eighth power stands for: sign(b) |b|^(1/8) / 128 in float32, by three square roots as in the original.

    Source: tensorflow/tensor2tensor, utils/quantization.py, `EighthPowerEncoding.decode`.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> EighthRoot(in_memory(np.array([-(64.0**8), 0.0], np.float32))).read().tolist()
        [-0.5, 0.0]
    """

    @property
    def dtype(self) -> DType:
        """Float32: an eighth of the relative error of what is stored is less than bfloat16 can say."""
        return DTYPES["float32"]

    def read(self, index: Index | None = None) -> Array:
        block = self.tensor.read(index).astype(np.float32)
        root = np.sqrt(np.sqrt(np.sqrt(np.abs(block))))
        return np.asarray(np.sign(block) * root * np.float32(1 / 128))

    def to_json(self) -> dict[str, Any]:
        return {"op": "eighth_root", "source": self.tensor.to_json()}


@dataclass(frozen=True)
class EighthPower(EachElement):
    """A tensor as an eighth power in bfloat16, sign(w) (128 |w|)^8, rounded to nearest; undoes `EighthRoot` to the bit.

    Source: tensorflow/tensor2tensor, utils/quantization.py, `EighthPowerEncoding.encode`.
    """

    @property
    def dtype(self) -> DType:
        """Bfloat16."""
        return DTYPES["bfloat16"]

    def read(self, index: Index | None = None) -> Array:
        block = self.tensor.read(index).astype(np.float32)
        with np.errstate(over="ignore", under="ignore"):  # what lies beyond the range is infinite, or zero
            power = np.square(np.square(np.square(np.abs(block) * np.float32(128))))
            return np.asarray(np.sign(block) * power).astype(self.dtype)

    def to_json(self) -> dict[str, Any]:
        return {"op": "eighth_power", "source": self.tensor.to_json()}


@dataclass(frozen=True)
class Narrowed(EachElement):
    """A tensor in a dtype that doesn't hold all of its values, rounded to nearest; a wider one is a `Cast`."""

    dtype: DType

    def read(self, index: Index | None = None) -> Array:
        with np.errstate(over="ignore"):  # what lies beyond the range is infinite
            return rounded(self.tensor.read(index), self.dtype)

    def to_json(self) -> dict[str, Any]:
        return {"op": "narrowed", "source": self.tensor.to_json(), "dtype": self.dtype.name}


def cast(tensor: Tensor, dtype: DType) -> Tensor:
    """Returns a tensor in another dtype: `Cast` where every value stays, else `Narrowed`."""
    if tensor.dtype == dtype:
        return tensor
    return Cast(tensor, dtype) if widens(tensor.dtype, dtype) else Narrowed(tensor, dtype)


@dataclass(frozen=True)
class Scaled(EachElement, OfOne):
    """A tensor times a number, rounded once to its own dtype.

    A power of two keeps every digit of what stays in the dtype's range.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Scaled(in_memory(np.array([1.0, 3.0], np.float32)), 0.25).read().tolist()
        [0.25, 0.75]
    """

    factor: float

    def read(self, index: Index | None = None) -> Array:
        with np.errstate(over="ignore", under="ignore"):
            product = self.tensor.read(index).astype(np.float64) * self.factor
            return rounded(product, self.dtype)

    def to_json(self) -> dict[str, Any]:
        op = "shifted" if math.frexp(self.factor)[0] == 0.5 else "scaled"
        return {"op": op, "source": self.tensor.to_json(), "factor": self.factor}
