"""Tensors in which the places along one axis are others: in another order, some of them, or those of several tensors.

Whatever the order, a block is read with at most a block of the same size besides, however far its places lie apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from statekit.errors import UsageError
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
    rounded,
)
from statekit.tensors.views import EachElement

_GAP = 8
"""Places that are read over rather than read around: the next read costs more."""
_Places = npt.NDArray[np.int64]


class _Along(OfOne):
    """A tensor whose places along `axis` are some of another's."""

    tensor: Tensor
    axis: int

    @property
    def _length(self) -> int:
        raise NotImplementedError

    def _places(self, start: int, stop: int) -> _Places:
        raise NotImplementedError

    @property
    def shape(self) -> Shape:
        sizes = self.tensor.shape
        return (*sizes[: self.axis], self._length, *sizes[self.axis + 1 :])

    @property
    def grain(self) -> Shape:
        """The cheapest block: the tensor's, as far as it goes."""
        grain, at = self.tensor.grain, self.axis
        return (*grain[:at], min(grain[at], self._length), *grain[at + 1 :])

    def read(self, index: Index | None = None) -> Array:
        """Reads a block: runs of places that lie near each other."""
        index, at = normal_index(index, self.shape), self.axis
        block = np.empty(index_shape(index), self.dtype)
        if not block.size:
            return block
        places = self._places(index[at].start, index[at].stop)
        order = np.argsort(places, kind="stable")
        ascending = places[order]
        ends = [*(np.flatnonzero(np.diff(ascending) > _GAP) + 1).tolist(), len(places)]
        head: tuple[Any, ...] = (slice(None),) * at
        begin = 0
        for end in ends:
            while begin < end:
                first = int(ascending[begin])
                last = min(end, int(np.searchsorted(ascending, first + len(places))))
                along = slice(first, int(ascending[last - 1]) + 1)
                run = self.tensor.read((*index[:at], along, *index[at + 1 :]))
                block[(*head, order[begin:last])] = run[(*head, ascending[begin:last] - first)]
                begin = last
        return block


@dataclass(frozen=True)
class Reordered(_Along):
    """A tensor with the places of one axis in another order: read as axes of `sizes`, which are permuted.

    Raises:
        UsageError: `sizes` don't make up the axis, or `order` doesn't name each once.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Reordered(in_memory(np.arange(6)), 0, (2, 3), (1, 0)).read().tolist()
        [0, 3, 1, 4, 2, 5]
    """

    tensor: Tensor
    axis: int
    sizes: Shape
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if math.prod(self.sizes) != self._length or sorted(self.order) != list(range(len(self.sizes))):
            raise UsageError(
                "An axis can't be reordered so.",
                expected=f"sizes that make up {self._length}, each once in the order",
                found=f"{self.sizes} in order {self.order}",
            )

    @property
    def _length(self) -> int:
        return self.tensor.shape[self.axis]

    def _places(self, start: int, stop: int) -> _Places:
        places = np.zeros(stop - start, np.int64)
        rest = np.arange(start, stop)
        strides = [math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes))]
        for i in reversed(self.order):
            rest, digit = np.divmod(rest, self.sizes[i])
            places += digit * strides[i]
        return places

    def to_json(self) -> dict[str, Any]:
        return {
            "op": "reordered", "source": self.tensor.to_json(), "axis": self.axis,
            "sizes": list(self.sizes), "order": list(self.order),
        }  # fmt: skip


@dataclass(frozen=True)
class Picked(_Along):
    """A run of an axis out of every `period` places, from `start` on; undoes `Joined`.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Picked(in_memory(np.arange(6)), 0, 1, 2, 3).read().tolist()
        [1, 2, 4, 5]
    """

    tensor: Tensor
    axis: int
    start: int
    run: int
    period: int

    def __post_init__(self) -> None:
        length = self.tensor.shape[self.axis]
        inside = self.start >= 0 and self.run >= 0 and self.start + self.run <= self.period
        if not inside or self.period < 1 or length % self.period:
            raise UsageError(
                "An axis has no such runs.",
                expected=f"a period that divides {length}, and a run inside",
                found=f"{self.run} from {self.start} of every {self.period}",
            )

    @property
    def _length(self) -> int:
        return self.tensor.shape[self.axis] // self.period * self.run

    def _places(self, start: int, stop: int) -> _Places:
        group, rest = np.divmod(np.arange(start, stop), self.run)
        return group * self.period + self.start + rest

    def to_json(self) -> dict[str, Any]:
        return {
            "op": "picked", "source": self.tensor.to_json(), "axis": self.axis,
            "start": self.start, "run": self.run, "period": self.period,
        }  # fmt: skip


@dataclass(frozen=True)
class Joined(OfSeveral):
    """Tensors one after the other along an axis, in turns of a run of each.

    Raises:
        UsageError: They differ in more than that axis, or a tensor isn't as many runs as the others.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Joined((in_memory(np.arange(4)), in_memory(np.array([8, 9]))), 0, (2, 1)).read().tolist()
        [0, 1, 8, 2, 3, 9]
    """

    tensors: Sequence[Tensor]
    axis: int
    runs: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = [tensor.shape[self.axis] for tensor in self.tensors]
        turns = {divmod(n, run) if run else (0, n) for n, run in zip(lengths, self.runs, strict=True)}
        forms = {(*t.shape[: self.axis], *t.shape[self.axis + 1 :], t.dtype.name) for t in self.tensors}
        if len(forms) != 1 or len(turns) != 1 or next(iter(turns))[1]:
            raise UsageError(
                "Tensors can't be joined so.",
                expected=f"tensors alike but for axis {self.axis}, of as many runs {self.runs} each",
                found=", ".join(f"{t.dtype.name} {t.shape}" for t in self.tensors),
            )

    @cached_property
    def shape(self) -> Shape:
        first = self.tensors[0].shape
        length = sum(tensor.shape[self.axis] for tensor in self.tensors)
        return (*first[: self.axis], length, *first[self.axis + 1 :])

    @property
    def grain(self) -> Shape:
        return self.tensors[0].grain

    def read(self, index: Index | None = None) -> Array:
        """Reads a block: of each tensor the run of places that stand in it."""
        index, at = normal_index(index, self.shape), self.axis
        block = np.empty(index_shape(index), self.dtype)
        if not block.size:
            return block
        wanted, period = index[at], sum(self.runs)
        for tensor, run, start in zip(
            self.tensors, self.runs, accumulate(self.runs, initial=0), strict=False
        ):
            low, high = (
                x // period * run + min(max(x % period - start, 0), run) for x in (wanted.start, wanted.stop)
            )
            if low < high:
                group, rest = np.divmod(np.arange(low, high), run)
                places = group * period + start + rest - wanted.start
                part = tensor.read((*index[:at], slice(low, high), *index[at + 1 :]))
                block[(*(slice(None),) * at, places)] = part
        return block

    def to_json(self) -> dict[str, Any]:
        sources = [tensor.to_json() for tensor in self.tensors]
        return {"op": "concatenated", "sources": sources, "axis": self.axis, "runs": list(self.runs)}


By: TypeAlias = Literal["mean", "root_mean_square", "sum"]
"""How tensors are made one."""


@dataclass(frozen=True)
class Combined(OfSeveral):
    """Tensors of one shape as one, element by element, in float64 and rounded once to their dtype.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> parts = in_memory(np.array([1.0])), in_memory(np.array([5.0]))
        >>> Combined(parts, (3, 1)).read().tolist(), Combined(parts, (3, 1), "sum").read().tolist()
        ([2.0], [6.0])
    """

    tensors: Sequence[Tensor]
    weights: tuple[int, ...]
    by: By = "mean"

    @property
    def shape(self) -> Shape:
        return self.tensors[0].shape

    @property
    def grain(self) -> Shape:
        return self.tensors[0].grain

    def read(self, index: Index | None = None) -> Array:
        """Reads a block: that of each tensor, one after the other."""
        index = normal_index(index, self.shape)
        total = np.zeros(index_shape(index), np.float64)
        for tensor, weight in zip(self.tensors, self.weights, strict=True):
            block = tensor.read(index).astype(np.float64)
            total += (
                block if self.by == "sum" else weight * (block if self.by == "mean" else np.square(block))
            )
        if self.by != "sum":
            with np.errstate(invalid="ignore"):  # the mean of nothing is NaN
                total = np.asarray(total / sum(self.weights))
        return rounded(total if self.by != "root_mean_square" else np.sqrt(total), self.dtype)

    def to_json(self) -> dict[str, Any]:
        sources = [tensor.to_json() for tensor in self.tensors]
        return {"op": "combined", "sources": sources, "weights": list(self.weights), "by": self.by}


@dataclass(frozen=True)
class Rescaled(EachElement, OfOne):
    """A tensor times `part` / `whole`, which stand along some of its axes; where `whole` is 0, as it is.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> halves = in_memory(np.array([1.0, 0.0])), in_memory(np.array([2.0, 0.0]))
        >>> Rescaled(in_memory(np.array([[4.0, 6.0], [8.0, 9.0]])), *halves, (0,)).read().tolist()
        [[2.0, 3.0], [8.0, 9.0]]
    """

    part: Tensor
    whole: Tensor
    axes: tuple[int, ...]

    def read(self, index: Index | None = None) -> Array:
        """Reads a block, computed in float64 and rounded once."""
        index = normal_index(index, self.shape)
        reduced = tuple(index[i] for i in self.axes)
        part, whole = (tensor.read(reduced).astype(np.float64) for tensor in (self.part, self.whole))
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(whole == 0, 1.0, part / whole)
            along = tuple(i for i in range(len(self.shape)) if i not in self.axes)
            block = self.tensor.read(index).astype(np.float64) * np.expand_dims(ratio, along)
            return rounded(block, self.dtype)

    def to_json(self) -> dict[str, Any]:
        parts = {"part": self.part.to_json(), "whole": self.whole.to_json()}
        return {"op": "rescaled", "source": self.tensor.to_json(), **parts, "axes": list(self.axes)}


@dataclass(frozen=True)
class Repeated(OfOne):
    """A tensor `count` times along a new axis.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Repeated(in_memory(np.array([1, 2])), 0, 2).read().tolist()
        [[1, 2], [1, 2]]
    """

    tensor: Tensor
    axis: int
    count: int

    @property
    def shape(self) -> Shape:
        return (*self.tensor.shape[: self.axis], self.count, *self.tensor.shape[self.axis :])

    @property
    def grain(self) -> Shape:
        """The cheapest block: one of them."""
        return (*self.tensor.grain[: self.axis], 1, *self.tensor.grain[self.axis :])

    def read(self, index: Index | None = None) -> Array:
        """Reads a block: once, however often it stands there."""
        index, at = normal_index(index, self.shape), self.axis
        values = self.tensor.read((*index[:at], *index[at + 1 :]))
        return np.ascontiguousarray(np.broadcast_to(np.expand_dims(values, at), index_shape(index)))

    def to_json(self) -> dict[str, Any]:
        return {"op": "repeated", "source": self.tensor.to_json(), "axis": self.axis, "count": self.count}


@dataclass(frozen=True)
class Padded(OfOne):
    """A tensor with more places along an axis, behind those it has: each `new`, or zeros if that is None.

    Example:
        >>> from statekit.tensors.tensor import in_memory
        >>> Padded(in_memory(np.array([1, 3])), 0, 4, in_memory(np.array(2))).read().tolist()
        [1, 3, 2, 2]
    """

    tensor: Tensor
    axis: int
    length: int
    new: Tensor | None = None

    @property
    def shape(self) -> Shape:
        return (*self.tensor.shape[: self.axis], self.length, *self.tensor.shape[self.axis + 1 :])

    @property
    def grain(self) -> Shape:
        """The cheapest block: the tensor's."""
        return self.tensor.grain

    def read(self, index: Index | None = None) -> Array:
        index, at = normal_index(index, self.shape), self.axis
        block = np.zeros(index_shape(index), self.dtype)
        wanted, length = index[at], self.tensor.shape[at]
        head = (slice(None),) * at
        old = max(0, min(wanted.stop, length) - wanted.start)
        if old:
            along = slice(wanted.start, wanted.start + old)
            block[(*head, slice(0, old))] = self.tensor.read((*index[:at], along, *index[at + 1 :]))
        if self.new is not None and old < wanted.stop - wanted.start:
            values = self.new.read((*index[:at], *index[at + 1 :]))
            block[(*head, slice(old, None))] = np.expand_dims(values, at)
        return block

    def to_json(self) -> dict[str, Any]:
        new = {} if self.new is None else {"new": self.new.to_json()}
        return {
            "op": "padded",
            "source": self.tensor.to_json(),
            "axis": self.axis,
            "length": self.length,
            **new,
        }


@dataclass(frozen=True)
class Reconstructed:
    """The second moment that factors stand for: their product over the mean of both, in float64 and rounded once.

    Attributes:
        row: One factor.
        column: The other.
        mean: The mean of either over what the other has averaged.
        axes: The axes of the result that each of the three has.
        shape: The result's.
    """

    row: Tensor
    column: Tensor
    mean: Tensor
    axes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    shape: Shape

    @property
    def dtype(self) -> DType:
        return self.row.dtype

    @property
    def grain(self) -> Shape:
        """The cheapest block: as it comes."""
        return self.shape

    def read(self, index: Index | None = None) -> Array:
        index = normal_index(index, self.shape)
        row, column, mean = (
            np.expand_dims(
                tensor.read(tuple(index[i] for i in axes)).astype(np.float64),
                tuple(i for i in range(len(self.shape)) if i not in axes),
            )
            for tensor, axes in zip((self.row, self.column, self.mean), self.axes, strict=True)
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            scaled = np.where(mean == 0, 0.0, column / mean)
            return np.ascontiguousarray(rounded(row * scaled, self.dtype))

    def to_json(self) -> dict[str, Any]:
        factors = {"row": self.row.to_json(), "column": self.column.to_json(), "mean": self.mean.to_json()}
        return {"op": "reconstructed", **factors, "shape": list(self.shape)}
