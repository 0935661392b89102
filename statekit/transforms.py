"""Tensors made of others, which are read when they are: axes of length 1, members of a stack, stacks, means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from statekit.errors import UsageError
from statekit.tensor import Array, DType, Index, Shape, Tensor, index_shape, normal_index


@dataclass(frozen=True)
class Reaxed:
    """The same values with axes of length 1 put in or taken out: shape (4, 1) as (4,), or the other way round.

    Raises:
        UsageError: The shapes differ in more than axes of length 1.

    Example:
        >>> from statekit.tensor import in_memory
        >>> Reaxed(in_memory(np.ones((4, 1))), (4,)).read().shape
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
    def dtype(self) -> DType:
        """The dtype."""
        return self.tensor.dtype

    @property
    def grain(self) -> Shape:
        """The cheapest block, in the new axes."""
        long = iter(g for g, n in zip(self.tensor.grain, self.tensor.shape, strict=True) if n != 1)
        return tuple(1 if n == 1 else next(long) for n in self.shape)

    def read(self, index: Index | None = None) -> Array:
        """Reads a block."""
        index = normal_index(index, self.shape)
        if 0 in index_shape(index):
            return np.empty(index_shape(index), self.dtype)
        long = iter(part for part, n in zip(index, self.shape, strict=True) if n != 1)
        inner = tuple(slice(0, 1) if n == 1 else next(long) for n in self.tensor.shape)
        return np.ascontiguousarray(self.tensor.read(inner)).reshape(index_shape(index))

    def to_json(self) -> dict[str, Any]:
        """Describes the tensor."""
        return {"op": "reaxed", "source": self.tensor.to_json(), "shape": list(self.shape)}


@dataclass(frozen=True)
class Member:
    """What stands at one place of an axis, without that axis.

    Example:
        >>> from statekit.tensor import in_memory
        >>> Member(in_memory(np.arange(6).reshape(2, 3)), 0, 1).read().tolist()
        [3, 4, 5]
    """

    tensor: Tensor
    axis: int
    place: int

    @property
    def shape(self) -> Shape:
        """The shape."""
        return (*self.tensor.shape[: self.axis], *self.tensor.shape[self.axis + 1 :])

    @property
    def dtype(self) -> DType:
        """The dtype."""
        return self.tensor.dtype

    @property
    def grain(self) -> Shape:
        """The cheapest block, without the axis."""
        return (*self.tensor.grain[: self.axis], *self.tensor.grain[self.axis + 1 :])

    def read(self, index: Index | None = None) -> Array:
        """Reads a block."""
        index = normal_index(index, self.shape)
        inner = (*index[: self.axis], slice(self.place, self.place + 1), *index[self.axis :])
        return np.ascontiguousarray(self.tensor.read(inner)).reshape(index_shape(index))

    def to_json(self) -> dict[str, Any]:
        """Describes the tensor."""
        return {"op": "member", "source": self.tensor.to_json(), "axis": self.axis, "place": self.place}


@dataclass(frozen=True)
class Stack:
    """Tensors of one shape and dtype along a new axis; undoes `Member`."""

    tensors: Sequence[Tensor]
    axis: int

    @cached_property
    def shape(self) -> Shape:
        """The shape."""
        inner = self.tensors[0].shape
        return (*inner[: self.axis], len(self.tensors), *inner[self.axis :])

    @property
    def dtype(self) -> DType:
        """The dtype."""
        return self.tensors[0].dtype

    @property
    def grain(self) -> Shape:
        """The cheapest block: of one tensor."""
        inner = self.tensors[0].grain
        return (*inner[: self.axis], 1, *inner[self.axis :])

    def read(self, index: Index | None = None) -> Array:
        """Reads a block."""
        index = normal_index(index, self.shape)
        inner = (*index[: self.axis], *index[self.axis + 1 :])
        block = np.empty(index_shape(index), self.dtype)
        for place, tensor in enumerate(self.tensors[index[self.axis]]):
            block[(slice(None),) * self.axis + (place,)] = tensor.read(inner)
        return block

    def to_json(self) -> dict[str, Any]:
        """Describes the tensor."""
        return {"op": "stack", "sources": [tensor.to_json() for tensor in self.tensors], "axis": self.axis}


@dataclass(frozen=True)
class Mean:
    """The mean along one axis, summed in float64 and rounded once to the tensor's dtype.

    A second moment in full becomes a factored one's: both are linear in the squared gradients.

    Example:
        >>> from statekit.tensor import in_memory
        >>> Mean(in_memory(np.array([[1.0, 2.0], [3.0, 6.0]], np.float32)), 0).read().tolist()
        [2.0, 4.0]
    """

    tensor: Tensor
    axis: int

    @property
    def shape(self) -> Shape:
        """The shape."""
        return (*self.tensor.shape[: self.axis], *self.tensor.shape[self.axis + 1 :])

    @property
    def dtype(self) -> DType:
        """The dtype."""
        return self.tensor.dtype

    @property
    def grain(self) -> Shape:
        """The cheapest block, without the axis."""
        return (*self.tensor.grain[: self.axis], *self.tensor.grain[self.axis + 1 :])

    def read(self, index: Index | None = None) -> Array:
        """Reads a block: the tensor's blocks along the axis, one after the other."""
        index, length = normal_index(index, self.shape), self.tensor.shape[self.axis]
        total = np.zeros(index_shape(index), np.float64)
        step = max(1, self.tensor.grain[self.axis])
        for start in range(0, length, step):
            along = slice(start, min(start + step, length))
            block = self.tensor.read((*index[: self.axis], along, *index[self.axis :]))
            total += block.sum(axis=self.axis, dtype=np.float64)
        return (total / length).astype(self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Describes the tensor."""
        return {"op": "mean", "source": self.tensor.to_json(), "axis": self.axis}
