"""What one tensor looks like, streamed block by block: histograms, tiles of a matrix, bars of a vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from statekit.errors import NotFoundError
from statekit.tensors.stats import BLOCK_BYTES, Stats, measure
from statekit.tensors.tensor import Array, Shape, Tensor, chunks, dtype_name, float_info, in_memory, nbytes

BINS = 64
"""Bins of a linear histogram."""
CELLS = 128
"""Cells that a picture of a matrix has along each side, at most."""
BARS = 512
"""Bars that a picture of a vector has, at most."""

OnRead = Callable[[int], object]


def picture(tensor: Tensor, on_read: OnRead = lambda size: None) -> dict[str, Any]:
    """Reads a tensor twice and returns what it looks like.

    Returns:
        `shape`, `dtype`, `bytes`; `stats` (`Stats.to_json`); `linear`, a histogram of the finite values in equal bins
        from the least to the greatest: `low`, `high`, `counts`; `saturated`, how many finite values are the dtype's
        greatest, of either sign; `tiles` of a matrix, or `bars` of a vector.
    """
    stats = measure(tensor, on_read)
    look = _Look(tensor, stats)
    for block in chunks(tensor, BLOCK_BYTES):
        look.take(block)
        on_read(block.nbytes)
    return {
        "shape": list(tensor.shape),
        "dtype": dtype_name(tensor.dtype),
        "bytes": nbytes(tensor),
        "stats": stats.to_json(),
        **look.done(),
    }


def of_array(values: Array) -> dict[str, Any]:
    """Returns tiles of an array with two or more axes, bars of any other, as `picture` does."""
    grid = Grid(values.shape)
    grid.take(np.asarray(values, np.float64))
    return grid.done()


def shape_of_matrix(shape: Shape) -> tuple[int, int]:
    """Returns the rows and columns of a tensor as pictures have it: its last axis are the columns.

    Example:
        >>> shape_of_matrix((3, 4, 5)), shape_of_matrix((7,)), shape_of_matrix(())
        ((12, 5), (1, 7), (1, 1))
    """
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def region(
    tensor: Tensor, rows: tuple[int, int], columns: tuple[int, int], on_read: OnRead = lambda size: None
) -> dict[str, Any]:
    """Reads a region of a matrix, or a stretch of a vector, once, and returns what it looks like, as close as fits.

    Args:
        tensor: The tensor, as a matrix (`shape_of_matrix`).
        rows: Its first row and the one behind its last.
        columns: The same of its columns.
        on_read: Told the bytes of each block that was read.

    Returns:
        `stats` of the region, and its `tiles` or `bars`, as `picture` has them.

    Raises:
        NotFoundError: The tensor has no such rows or columns.
    """
    for name, (first, end), count in zip(
        ("rows", "columns"), (rows, columns), shape_of_matrix(tensor.shape), strict=True
    ):
        if not 0 <= first < end <= count:
            raise NotFoundError(
                f"There are no such {name}.", expected=f"from 0 to {count}", found=f"{first} to {end}"
            )
    wide = columns[1] - columns[0]
    grid, stats = Grid((rows[1] - rows[0], wide) if len(tensor.shape) > 1 else (wide,)), Stats()
    for block in _rows(tensor, rows, columns):
        stats += measure(in_memory(block))
        grid.take(np.asarray(np.abs(block) if block.dtype.kind == "c" else block, np.float64))
        on_read(block.nbytes)
    return {"stats": stats.to_json(), **grid.done()}


def _rows(tensor: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Iterator[Array]:
    """Reads a region of a matrix some rows at a time, or a part of one where a row is large, in C order."""
    shape = tensor.shape if len(tensor.shape) > 1 else (1, math.prod(tensor.shape))
    item = tensor.dtype.itemsize
    wide = columns[1] - columns[0]
    most = max(1, BLOCK_BYTES // (wide * item))
    step = wide if most > 1 else max(1, BLOCK_BYTES // item)
    row = rows[0]
    while row < rows[1]:
        lead, at = divmod(row, shape[-2])
        count = min(shape[-2] - at, rows[1] - row, most)
        head = tuple(slice(int(i), int(i) + 1) for i in np.unravel_index(lead, shape[:-2]))
        for start in range(columns[0], columns[1], step):
            across = slice(start, min(start + step, columns[1]))
            index = (*head, slice(at, at + count), across)[-len(tensor.shape) or 2 :]
            block = tensor.read(index if tensor.shape else None)
            yield np.ascontiguousarray(block).reshape(count, -1)
        row += count


class Grid:
    """A tensor's values, put together in cells as they pass by in C order.

    A tensor with two or more axes is a matrix whose columns are its last axis. Each cell of `tiles` is the mean
    magnitude of the finite values in a rectangle of `each[0]` rows and `each[1]` columns; each of `bars` the mean of
    `each` values in a row. None stands where none is finite, or their sum isn't.
    """

    def __init__(self, shape: Shape) -> None:
        self._matrix = len(shape) > 1
        self._columns = shape[-1] if self._matrix else math.prod(shape)
        self._rows = math.prod(shape[:-1]) if self._matrix else 1
        self._tall = -(-self._rows // CELLS) or 1
        self._wide = -(-self._columns // (CELLS if self._matrix else BARS)) or 1
        cells = (-(-self._rows // self._tall), -(-self._columns // self._wide))
        self._sums, self._counts = np.zeros(cells), np.zeros(cells, np.int64)
        self._at = 0

    def take(self, values: Array) -> None:
        """Takes float64 values that follow those before."""
        with np.errstate(over="ignore"):
            self._take(values)

    def _take(self, values: Array) -> None:
        if not values.size:
            return
        good = np.isfinite(values)
        shown = np.where(good, np.abs(values) if self._matrix else values, 0.0)
        row, column = divmod(self._at, self._columns)
        self._at += values.size
        if column or values.size % self._columns:  # a part of one row, as blocks are cut
            cells = (column + np.arange(values.size)) // self._wide
            size = self._sums.shape[1]
            self._sums[row // self._tall] += np.bincount(cells, shown.ravel(), size)
            self._counts[row // self._tall] += np.bincount(cells, good.ravel(), size).astype(np.int64)
            return
        edges = np.arange(0, self._columns, self._wide)
        rows = (row + np.arange(values.size // self._columns)) // self._tall
        np.add.at(self._sums, rows, np.add.reduceat(shown.reshape(-1, self._columns), edges, axis=1))
        counts = np.add.reduceat(good.reshape(-1, self._columns), edges, axis=1, dtype=np.int64)
        np.add.at(self._counts, rows, counts)

    def done(self) -> dict[str, Any]:
        """Returns the cells."""
        with np.errstate(invalid="ignore"):  # where nothing was counted
            means = self._sums / self._counts
        plain = [[v if math.isfinite(v) else None for v in row] for row in means.tolist()]
        if not self._matrix:
            return {"bars": {"each": self._wide, "values": plain[0] if plain else []}}
        shape = [self._rows, self._columns]
        return {"tiles": {"shape": shape, "each": [self._tall, self._wide], "cells": plain}}


class _Look:
    def __init__(self, tensor: Tensor, stats: Stats) -> None:
        self._low, self._high = stats.minimum, stats.maximum
        self._counts = np.zeros(BINS, np.int64)
        self._grid = Grid(tensor.shape)
        kind = tensor.dtype.kind
        is_float = kind in "fV" and dtype_name(tensor.dtype) != "bool"
        self._most = float(float_info(tensor.dtype).max) if is_float else math.inf
        self._saturated = 0

    def take(self, block: Array) -> None:
        values = np.abs(block).astype(np.float64) if block.dtype.kind == "c" else block.astype(np.float64)
        self._grid.take(values)
        good = values[np.isfinite(values)]
        self._saturated += int(np.count_nonzero(np.abs(good) >= self._most))
        if self._low is not None and self._high is not None:
            self._counts += linear(good, self._low, self._high)

    def done(self) -> dict[str, Any]:
        span = None
        if self._low is not None:
            span = {"low": self._low, "high": self._high, "counts": self._counts.tolist()}
        return {"linear": span, "saturated": self._saturated, **self._grid.done()}


def linear(values: Array, low: float, high: float) -> Array:
    """Counts finite float64 values in equal bins from the least to the greatest of them."""
    if low == high:  # all are one: in the first bin
        counts = np.zeros(BINS, np.int64)
        counts[0] = values.size
        return counts
    with np.errstate(over="ignore", invalid="ignore"):
        share = values / high - low / high if math.isinf(high - low) else (values - low) / (high - low)
        share = share / (1 - low / high) if math.isinf(high - low) else share
    at = np.minimum((share * BINS).astype(np.intp), BINS - 1)
    return np.bincount(at.ravel(), minlength=BINS).astype(np.int64)
