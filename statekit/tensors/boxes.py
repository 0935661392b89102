"""Boxes: tensors that are stored in parts, each a block of the whole, as ranks and partitioned variables hold them.

Input: a tensor's shape and its boxes. Output: what is wrong with them; the whole over tensors that lie in them; and a
part of a whole, to be written again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from statekit.budget import Account
from statekit.errors import CorruptError, UsageError
from statekit.tensors.tensor import (
    Array,
    DType,
    Index,
    OfOne,
    OfSeveral,
    Shape,
    Tensor,
    index_shape,
    normal_index,
)

Box: TypeAlias = tuple[Shape, Shape]
"""First index and size along each axis."""

_COMPARED = 8
"""Boxes that one step compares; a regular grid of n boxes takes at most n times the root of n of them."""


def tiling_fault(shape: Shape, boxes: Sequence[Box], place: str = "", account: Account | None = None) -> str:
    """Returns what is wrong with the boxes of a tensor; "" if they tile it.

    Args:
        shape: The tensor's shape.
        boxes: Where its parts lie in it.
        place: What errors call it.
        account: What comparing them draws on; one of its own if None.

    Raises:
        BudgetError: There are so many, so oddly placed, that comparing them takes too long.

    Example:
        >>> tiling_fault((4, 2), [((0, 0), (3, 2)), ((3, 0), (1, 2))])
        ''
        >>> tiling_fault((4, 2), [((0, 0), (3, 2))])
        'has 6 of 8 values'
    """
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"has a part of {len(sizes)} axes, expected {len(shape)}"
        if any(start + n > whole for start, n, whole in zip(offsets, sizes, shape, strict=True)):
            return f"has a part at {offsets} of size {sizes} that reaches beyond {shape}"
    filled = [box for box in boxes if math.prod(box[1])]
    clash = next(_overlaps(shape, filled, place, account or Account()), None)
    if clash:
        return f"has parts at {clash[0][0]} and {clash[1][0]} that overlap"
    covered, size = sum(math.prod(sizes) for _, sizes in filled), math.prod(shape)
    return "" if covered == size else f"has {covered} of {size} values"


def _overlaps(shape: Shape, boxes: Sequence[Box], place: str, account: Account) -> Iterator[tuple[Box, Box]]:
    """Yields overlapping pairs, sweeping along the axis that is cut most often."""
    if len(boxes) < 2:
        return
    if not shape:
        yield boxes[0], boxes[1]
        return
    axis = max(range(len(shape)), key=lambda i: len({offsets[i] for offsets, _ in boxes}))
    reached: list[Box] = []
    compared = 0
    for box in sorted(boxes, key=lambda entry: entry[0][axis]):
        start = box[0][axis]
        reached = [other for other in reached if other[0][axis] + other[1][axis] > start]
        compared += len(reached)
        account.step(compared // _COMPARED, "A tensor cut into too many parts", place)
        compared %= _COMPARED
        yield from ((other, box) for other in reached if _meet(other, box))
        reached.append(box)


def _meet(left: Box, right: Box) -> bool:
    return all(
        a < b + m and b < a + n for a, n, b, m in zip(left[0], left[1], right[0], right[1], strict=True)
    )


def overlap(index: Index, box: Box) -> tuple[Index, Index] | None:
    """Returns what a block of a tensor has of a box, counted within the box and within the block; None if nothing.

    Example:
        >>> overlap((slice(1, 4),), ((3,), (2,)))
        ((slice(0, 1, None),), (slice(2, 3, None),))
    """
    offsets, sizes = box
    low = [max(s.start, at) for s, at in zip(index, offsets, strict=True)]
    high = [min(s.stop, at + n) for s, at, n in zip(index, offsets, sizes, strict=True)]
    if not all(a < b for a, b in zip(low, high, strict=True)):
        return None
    within = tuple(slice(a - at, b - at) for a, b, at in zip(low, high, offsets, strict=True))
    inner = tuple(slice(a - s.start, b - s.start) for a, b, s in zip(low, high, index, strict=True))
    return within, inner


@dataclass(frozen=True)
class Joined:
    """One tensor, joined of tensors of one dtype by the index at which each begins.

    Raises:
        UsageError: They don't tile it, or have several dtypes.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Joined({(0,): in_memory(np.arange(3)), (3,): in_memory(np.arange(2))}, (5,)).read().tolist()
        [0, 1, 2, 0, 1]
    """

    pieces: Mapping[tuple[int, ...], Tensor]
    shape: Shape

    def __post_init__(self) -> None:
        fault = tiling_fault(self.shape, [(at, part.shape) for at, part in self.pieces.items()])
        dtypes = {part.dtype.name for part in self.pieces.values()}
        if fault or len(dtypes) != 1:
            raise UsageError(
                "Parts don't make up a tensor.",
                expected=f"boxes of one dtype that tile {self.shape}",
                found=fault or ", ".join(sorted(dtypes)) or "no part",
            )

    @property
    def dtype(self) -> DType:
        return next(iter(self.pieces.values())).dtype

    @property
    def grain(self) -> Shape:
        """The cheapest block: as large as the first part."""
        return tuple(max(n, 1) for n in next(iter(self.pieces.values())).shape)

    def read(self, index: Index | None = None) -> Array:
        index = normal_index(index, self.shape)
        block = np.empty(index_shape(index), self.dtype)
        for at, part in self.pieces.items():
            if (both := overlap(index, (at, part.shape))) is not None:
                block[both[1]] = part.read(both[0])
        return block

    def to_json(self) -> dict[str, Any]:
        parts = [{"at": list(at), "source": part.to_json()} for at, part in self.pieces.items()]
        return {"op": "joined", "sources": parts, "shape": list(self.shape)}


@dataclass(frozen=True)
class Cut(OfOne):
    """What a tensor has in a box; undoes `Joined`.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Cut(in_memory(np.arange(6).reshape(2, 3)), (slice(0, 2), slice(1, 3))).read().tolist()
        [[1, 2], [4, 5]]
    """

    tensor: Tensor
    box: Index

    @property
    def shape(self) -> Shape:
        return index_shape(self.box)

    @property
    def grain(self) -> Shape:
        """The cheapest block: the tensor's, as far as it lies in the box."""
        return tuple(max(min(g, n), 1) for g, n in zip(self.tensor.grain, self.shape, strict=True))

    def read(self, index: Index | None = None) -> Array:
        index = normal_index(index, self.shape)
        moved = zip(index, self.box, strict=True)
        return self.tensor.read(tuple(slice(s.start + b.start, s.stop + b.start) for s, b in moved))

    def to_json(self) -> dict[str, Any]:
        box = [[part.start, part.stop] for part in self.box]
        return {"op": "cut", "source": self.tensor.to_json(), "box": box}


@dataclass(frozen=True)
class Agreed(OfSeveral):
    """A tensor that several ranks hold, each the same: reading it compares them.

    Attributes:
        tensors: What the ranks hold.
        name: Its name, for messages.
        remedy: What to do where they differ.

    Raises:
        CorruptError: When read, they differ.
    """

    tensors: tuple[Tensor, ...]
    name: str
    remedy: str = ""

    @property
    def shape(self) -> Shape:
        return self.tensors[0].shape

    @property
    def grain(self) -> Shape:
        """The first's cheapest block."""
        return self.tensors[0].grain

    def read(self, index: Index | None = None) -> Array:
        """Reads a block of all, and compares them."""
        first, *others = (tensor.read(index) for tensor in self.tensors)
        if any(first.tobytes() != other.tobytes() for other in others):
            raise CorruptError(
                "Ranks hold different values of what each of them has whole.",
                place=self.name,
                expected=f"equal values on {len(self.tensors)} ranks",
                remedy=self.remedy,
            )
        return first

    def to_json(self) -> dict[str, Any]:
        """Describes the tensor: the first."""
        return self.tensors[0].to_json()
