"""Arrays in chunks: what a header says, and blocks that touch only the chunks they need.

Both formats of zarr cut an array on a regular grid and compress each chunk by itself. Format 3 may keep many chunks
in one value, a shard, whose index says where each lies.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.converters.formats.zarr.chunks import (
    SLAB,
    DecodedStream,
    RawStream,
    check_size,
    copy_block,
    first_byte,
    open_stream,
)
from statekit.converters.formats.zarr.shards import Shards
from statekit.converters.formats.zarr.stores import Store, Value
from statekit.errors import CorruptError, FormatError, RefusedError
from statekit.tensors.tensor import Array, DType, Index, Shape, Stored, index_shape, positions

_MAX_RANK = 64
_MAX_ELEMENTS = 2**60
_MAX_LOOKED_FOR = 100_000
_MAX_FILLED = 2**30
_MAX_OPEN = 16


@dataclass(frozen=True)
class Header:
    """What its header says of an array.

    Attributes:
        shape: Its shape.
        chunks: The shape of each chunk; a chunk at the edge is stored in full.
        dtype: The dtype of its values.
        compressor: `gzip`, `zlib`, `zstd` or None.
        level: The compressor's level, for writing.
        fill: The value of chunks that are absent; None if none may be.
        separator: What joins the parts of a chunk's key: `.` or `/`.
        keys: What every chunk's key begins with: nothing, or the `c` of format 3.
        shards: How chunks lie together in shards; None where each is a value of its own.
    """

    shape: Shape
    chunks: Shape
    dtype: DType
    compressor: str | None = None
    level: int = 1
    fill: float | None = None
    separator: str = "."
    keys: str = ""
    shards: Shards | None = None

    def chunk_bytes(self) -> int:
        """Returns the size of a decoded chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def grid(self) -> Shape:
        """Returns how many chunks there are along each axis."""
        return _cut(self.shape, self.chunks)

    def values_grid(self) -> Shape:
        """Returns how many values there are along each axis: shards, or else chunks."""
        return _cut(self.shape, self.shards.shape if self.shards else self.chunks)

    def value_key(self, position: tuple[int, ...]) -> str:
        """Returns the key of a shard or chunk; that of an array of rank 0 is `0` or `c`."""
        parts = [self.keys, *map(str, position)] if self.keys else [*map(str, position)]
        return self.separator.join(parts) or "0"

    def split(self, position: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the position of a chunk's value, and of the chunk within it."""
        if self.shards is None:
            return position, ()
        pairs = [divmod(i, n) for i, n in zip(position, self.shards.grid(self.chunks), strict=True)]
        return tuple(outer for outer, _ in pairs), tuple(inner for _, inner in pairs)


def _cut(shape: Shape, part: Shape) -> Shape:
    return tuple(-(-n // c) for n, c in zip(shape, part, strict=True))


def checked_shape(value: object, place: str, least: int = 0) -> Shape:
    """Returns a shape that a file declares.

    Raises:
        FormatError: It isn't a list of integers, each at least `least`.
        RefusedError: No array can be that large.
    """
    if (
        not isinstance(value, list)
        or len(value) > _MAX_RANK
        or not all(type(n) is int and n >= least for n in value)
    ):
        raise FormatError(
            "A shape isn't one.",
            place=place,
            expected=f"at most {_MAX_RANK} integers, each at least {least}",
            found=repr(value)[:200],
        )
    if math.prod(n for n in value if n) > _MAX_ELEMENTS:
        raise RefusedError("An array declares an absurd size.", place=place, found=f"shape {value}")
    return tuple(value)


def checked_header(
    shape: object,
    chunks: object,
    dtype: DType,
    place: str,
    compressor: str | None,
    level: int = 1,
    fill: float | None = None,
    separator: str = ".",
    keys: str = "",
    shards: Shards | None = None,
) -> Header:
    """Returns a header whose shape and chunks fit each other.

    Raises:
        FormatError: They don't.
    """
    sizes, cuts = checked_shape(shape, place), checked_shape(chunks, place, 1)
    if len(sizes) != len(cuts):
        raise FormatError(
            "An array's chunks have another rank than the array.",
            place=place,
            expected=f"{len(sizes)} axes",
            found=f"chunks of shape {cuts}",
        )
    return Header(sizes, cuts, dtype, compressor, level, fill, separator, keys, shards)


def open_array(store: Store, prefix: str, header: Header, name: str) -> Stored:
    """Returns the tensor of an array.

    Args:
        store: Where it lies.
        prefix: The start of its keys, without the last `/`.
        header: Its header.
        name: Its native name.
    """
    return Stored(
        header.shape,
        header.dtype,
        _Reader(store, prefix, header),
        name,
        f"{store.place}/{prefix}",
        header.chunks,
    )


def absent_chunks(store: Store, prefix: str, header: Header) -> list[str]:
    """Returns the keys of shards or chunks that are absent and read as fill value.

    Raises:
        RefusedError: There are too many chunks to look for, or absent ones claim more than 1 GiB.
    """
    if header.fill is None:
        return []
    place = f"{store.place}/{prefix}"
    grid = header.values_grid()
    if math.prod(grid) > _MAX_LOOKED_FOR:
        raise RefusedError("An array has an absurd number of chunks.", place=place, found=f"{header}")
    absent = [
        f"{header.value_key(position)}{inside}"
        for position in positions([range(n) for n in grid])
        for inside in _absent(header, store.value(f"{prefix}/{header.value_key(position)}"))
    ]
    if len(absent) * header.chunk_bytes() > _MAX_FILLED:
        raise RefusedError(
            "An array declares values that aren't stored.", place=place, found=f"{len(absent)} absent chunks"
        )
    return absent


def _absent(header: Header, value: Value | None) -> list[str]:
    """Returns for each absent chunk of a value what its key has in addition: nothing, or its place in the shard."""
    if header.shards is None:
        return [] if value is not None else [""]
    inside = header.shards.grid(header.chunks)
    if math.prod(inside) > _MAX_LOOKED_FOR:
        raise RefusedError("A shard has an absurd number of chunks.", found=f"{header}")
    index = None if value is None else header.shards.read_index(value, header.chunks)
    return [
        f"[{','.join(map(str, position))}]"
        for position in positions([range(n) for n in inside])
        if value is None or index is None or header.shards.chunk(value, index, position) is None
    ]


def _view(array: Array, index: Index) -> Array:
    where: tuple[Any, ...] = (*index, ...)  # the ellipsis keeps rank 0 a view
    view: Array = array[where]
    return view


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "statekit-zarr")


class _Reader:
    """Reads blocks of one array.

    A large chunk of which a block took a part stays open where that ended: reading on continues there, so that
    streaming an array decodes each chunk once.
    """

    def __init__(self, store: Store, prefix: str, header: Header) -> None:
        self._store, self._prefix, self._header = store, prefix, header
        self._open: dict[tuple[int, ...], DecodedStream | RawStream] = {}
        self._indexes: dict[tuple[int, ...], Array] = {}

    def __call__(self, index: Index) -> Array:
        held: dict[tuple[int, ...], Value | None] = {}
        parts = [
            (position, inner, outer, self._value(position, held))
            for position, inner, outer in _touched(self._header, index)
        ]
        out = np.empty(index_shape(index), self._header.dtype)
        jobs = [(position, inner, _view(out, outer), value) for position, inner, outer, value in parts]
        if len(jobs) == 1:
            self._copy(jobs[0])
        else:
            for _ in _pool().map(self._copy, jobs):
                pass
        return out

    def _value(self, position: tuple[int, ...], held: dict[tuple[int, ...], Value | None]) -> Value | None:
        """Returns the stored bytes of a chunk; `held` has the values, which may be shards, that this block touched."""
        header = self._header
        outer, inner = header.split(position)
        place = f"{self._prefix}/{header.value_key(outer)}"
        if outer not in held:
            held[outer] = self._store.value(place)
        value = held[outer]
        if value is not None and header.shards is not None:
            if outer not in self._indexes:
                if len(self._indexes) >= _MAX_OPEN:
                    self._indexes.clear()
                self._indexes[outer] = header.shards.read_index(value, header.chunks)
            value = header.shards.chunk(value, self._indexes[outer], inner)
        if value is not None:
            check_size(value, header.compressor, header.chunk_bytes())
        elif header.fill is None:
            raise CorruptError(
                "A chunk is absent.",
                place=f"{self._store.place}/{place}",
                expected=f"a chunk of shape {header.chunks}",
                remedy="the checkpoint is incomplete; copy it again, and don't leave out files",
            )
        return value

    def _copy(self, job: tuple[tuple[int, ...], Index, Array, Value | None]) -> None:
        position, index, out, value = job
        header = self._header
        if value is None:
            out[...] = header.fill
            return
        size = header.chunk_bytes()
        stream = self._open.pop(position, None)
        if stream is None or stream.position > first_byte(header.chunks, index, header.dtype.itemsize):
            stream = open_stream(value, header.compressor, size)
        copy_block(stream, header.chunks, index, out)
        if isinstance(stream, DecodedStream):
            if stream.position == size or size <= SLAB:  # a small chunk is always checked to its end
                stream.finish()
            elif len(self._open) < _MAX_OPEN:
                self._open[position] = stream


def _touched(header: Header, index: Index) -> Iterator[tuple[tuple[int, ...], Index, Index]]:
    """Yields position, block within the chunk, and block within the result, of every chunk that a block touches."""
    if any(cut.start == cut.stop for cut in index):
        return
    axes = list(zip(index, header.chunks, strict=True))
    for position in positions([range(cut.start // c, -(-cut.stop // c)) for cut, c in axes]):
        inner, outer = [], []
        for i, (cut, c) in zip(position, axes, strict=True):
            low, high = max(cut.start, i * c), min(cut.stop, (i + 1) * c)
            inner.append(slice(low - i * c, high - i * c))
            outer.append(slice(low - cut.start, high - cut.start))
        yield position, tuple(inner), tuple(outer)
