"""Zarr arrays, format 2, as T5X and Orbax write them: header, and blocks that touch only their chunks.

Source: zarr-specs, "Zarr storage specification version 2"; the `"bfloat16"` data type is an extension of TensorStore.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.converters.containers.chunk_stream import (
    SLAB,
    DecodedStream,
    RawStream,
    check_size,
    copy_block,
    first_byte,
    open_stream,
)
from statekit.converters.containers.kv_stores import Store, Value
from statekit.errors import CorruptError, FormatError, RefusedError
from statekit.tensor import DTYPES, Array, DType, Index, Shape, Stored, index_shape, positions

COMPRESSORS = ("gzip", "zlib", "zstd")
_MAX_RANK = 64
_MAX_ELEMENTS = 2**60
_MAX_LOOKED_FOR = 100_000
_MAX_FILLED = 2**30
_MAX_OPEN = 16
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Header:
    """What `.zarray` says of an array.

    Attributes:
        shape: Its shape.
        chunks: The shape of each chunk; a chunk at the edge is stored in full.
        dtype: The dtype of its values.
        compressor: `gzip`, `zlib`, `zstd` or None.
        level: The compressor's level, for writing.
        fill: The value of chunks that are absent; None if none may be.
        separator: What joins a chunk's indices in its key: `.` or `/`.
    """

    shape: Shape
    chunks: Shape
    dtype: DType
    compressor: str | None = None
    level: int = 1
    fill: float | None = None
    separator: str = "."

    def chunk_bytes(self) -> int:
        """Returns the size of a decoded chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def grid(self) -> Shape:
        """Returns how many chunks there are along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True))

    def chunk_key(self, position: tuple[int, ...]) -> str:
        """Returns the key of a chunk; that of an array of rank 0 is `0`."""
        return self.separator.join(map(str, position)) or "0"

    def to_json(self) -> dict[str, Any]:
        """Returns the content of `.zarray`, as TensorStore writes it."""
        return {
            "chunks": list(self.chunks),
            "compressor": self.compressor and {"id": self.compressor, "level": self.level},
            "dimension_separator": self.separator,
            "dtype": self.dtype.name if self.dtype.kind == "V" else self.dtype.newbyteorder("<").str,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(self.shape),
            "zarr_format": 2,
        }


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


def parse_header(data: bytes, place: str) -> Header:
    """Reads `.zarray`.

    Raises:
        FormatError: It isn't an array of format 2, in C order, without filters, of a known dtype and compressor.
    """
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError("An array's header isn't JSON.", place=place, found=str(error)[:200]) from error
    if not isinstance(parsed, dict):
        raise FormatError("An array's header isn't a JSON object.", place=place)
    expected = {"zarr_format": 2, "order": "C", "filters": None}
    faults = [f"{name} {parsed.get(name)!r}" for name, value in expected.items() if parsed.get(name) != value]
    separator = parsed.get("dimension_separator", ".")
    if separator not in (".", "/"):
        faults.append(f"dimension_separator {separator!r}")
    if faults:
        raise FormatError(
            "An array has a form that statekit doesn't read.",
            place=place,
            expected="zarr_format 2, order 'C', filters None, dimension_separator '.' or '/'",
            found=", ".join(faults)[:400],
        )
    compressor, level = parse_compressor(parsed.get("compressor"), place)
    return checked_header(
        parsed.get("shape"), parsed.get("chunks"), stored_dtype(parsed.get("dtype"), place), place,
        compressor, level, _fill(parsed.get("fill_value"), place), separator,
    )  # fmt: skip


def checked_header(
    shape: object,
    chunks: object,
    dtype: DType,
    place: str,
    compressor: str | None,
    level: int = 1,
    fill: float | None = None,
    separator: str = ".",
) -> Header:
    """Returns a header whose shape and chunks fit each other.

    Raises:
        FormatError: They don't.
    """
    header = Header(
        checked_shape(shape, place),
        checked_shape(chunks, place, 1),
        dtype,
        compressor,
        level,
        fill,
        separator,
    )
    if len(header.shape) != len(header.chunks):
        raise FormatError(
            "An array's chunks have another rank than the array.", place=place, found=f"{header}"
        )
    return header


def parse_compressor(value: object, place: str) -> tuple[str | None, int]:
    """Returns name and level of a compressor as `.zarray` or a spec states it; (None, 0) for null.

    Raises:
        FormatError: statekit doesn't know it.
    """
    if value is None:
        return None, 0
    name = value.get("id") if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or name not in COMPRESSORS:
        raise FormatError(
            "An array is compressed in a way that statekit doesn't read.",
            place=place,
            expected=f"null, {', '.join(COMPRESSORS)}",
            found=repr(name)[:200],
        )
    level = value.get("level", 1)
    return str(name), level if type(level) is int else 1


def stored_dtype(value: object, place: str) -> DType:
    """Returns the dtype of a zarr data type, such as `<f4`, `|b1` or `bfloat16`.

    Raises:
        FormatError: It is structured, big-endian, or unknown.
    """
    if isinstance(value, str) and value in DTYPES and DTYPES[value].kind == "V":
        return DTYPES[value]
    if isinstance(value, str) and len(value) <= 4 and value[:1] in ("<", "|"):
        for dtype in DTYPES.values():
            if dtype.kind != "V" and dtype.newbyteorder("<").str[1:] == value[1:]:
                return dtype
    raise FormatError(
        "An array has a data type that statekit doesn't read.",
        place=place,
        expected="<f4, <i4, |b1, bfloat16, ...",
        found=repr(value)[:200],
    )


def _fill(value: object, place: str) -> float | None:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str) and value in _SPECIAL:
        return _SPECIAL[value]
    raise FormatError(
        "An array has a fill value that statekit doesn't read.", place=place, found=repr(value)[:200]
    )


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
    """Returns the keys of chunks that are absent and read as fill value.

    Raises:
        RefusedError: There are too many chunks to look for, or absent ones claim more than 1 GiB.
    """
    if header.fill is None:
        return []
    place = f"{store.place}/{prefix}"
    if math.prod(header.grid()) > _MAX_LOOKED_FOR:
        raise RefusedError("An array has an absurd number of chunks.", place=place, found=f"{header}")
    keys = [header.chunk_key(position) for position in positions([range(n) for n in header.grid()])]
    absent = [key for key in keys if store.value(f"{prefix}/{key}") is None]
    if len(absent) * header.chunk_bytes() > _MAX_FILLED:
        raise RefusedError(
            "An array declares values that aren't stored.", place=place, found=f"{len(absent)} absent chunks"
        )
    return absent


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
        self._open: dict[str, DecodedStream | RawStream] = {}

    def __call__(self, index: Index) -> Array:
        parts = [(key, inner, outer, self._value(key)) for key, inner, outer in _touched(self._header, index)]
        out = np.empty(index_shape(index), self._header.dtype)
        jobs = [(key, inner, _view(out, outer), value) for key, inner, outer, value in parts]
        if len(jobs) == 1:
            self._copy(jobs[0])
        else:
            for _ in _pool().map(self._copy, jobs):
                pass
        return out

    def _value(self, key: str) -> Value | None:
        header = self._header
        value = self._store.value(f"{self._prefix}/{key}")
        if value is not None:
            check_size(value, header.compressor, header.chunk_bytes())
        elif header.fill is None:
            raise CorruptError(
                "A chunk is absent.",
                place=f"{self._store.place}/{self._prefix}/{key}",
                expected=f"a chunk of shape {header.chunks}",
                remedy="the checkpoint is incomplete; copy it again, and don't leave out files",
            )
        return value

    def _copy(self, job: tuple[str, Index, Array, Value | None]) -> None:
        key, index, out, value = job
        header = self._header
        if value is None:
            out[...] = header.fill
            return
        size = header.chunk_bytes()
        stream = self._open.pop(key, None)
        if stream is None or stream.position > first_byte(header.chunks, index, header.dtype.itemsize):
            stream = open_stream(value, header.compressor, size)
        copy_block(stream, header.chunks, index, out)
        if isinstance(stream, DecodedStream):
            if stream.position == size or size <= SLAB:  # a small chunk is always checked to its end
                stream.finish()
            elif len(self._open) < _MAX_OPEN:
                self._open[key] = stream


def _touched(header: Header, index: Index) -> Iterator[tuple[str, Index, Index]]:
    """Yields key, block within the chunk, and block within the result, of every chunk that a block touches."""
    if any(cut.start == cut.stop for cut in index):
        return
    axes = list(zip(index, header.chunks, strict=True))
    for position in positions([range(cut.start // c, -(-cut.stop // c)) for cut, c in axes]):
        inner, outer = [], []
        for i, (cut, c) in zip(position, axes, strict=True):
            low, high = max(cut.start, i * c), min(cut.stop, (i + 1) * c)
            inner.append(slice(low - i * c, high - i * c))
            outer.append(slice(low - cut.start, high - cut.start))
        yield header.chunk_key(position), tuple(inner), tuple(outer)
