"""NDArray records: how MXNet writes one array, alone in a pickle or one after the other in a list.

    magic u32, storage type i32, rank i32, sizes i64 each, device type i32, device id i32, dtype i32, values

Little-endian, without padding. The magic tells the generation: V3 is what numpy mode writes and reads, V2 what the
older mode does, V1 has no storage type, and before V1 the first word was the rank and sizes had 32 bits.
Source: apache/mxnet, src/ndarray/ndarray.cc, `NDArray::Save`, `NDArray::Load`, `NDArray::LegacyLoad`;
include/mxnet/tuple.h, `TShape::Save`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from statekit.converters.formats.pytorch.storage import Storage, window
from statekit.errors import CorruptError, FormatError, RefusedError
from statekit.tensors.tensor import DTYPES, Array, DType, Shape, Stored

Fetch: TypeAlias = Callable[[int, int], Array]
"""Reads bytes: (first byte, count) -> (count,) uint8."""

GENERATIONS = {0xF993FAC8: 1, 0xF993FAC9: 2, 0xF993FACA: 3}
_MAGIC = {generation: magic for magic, generation in GENERATIONS.items()}
CPU = (1, 0)
"""Device type and id of the first CPU. Source: include/mxnet/base.h, `Context`."""
MAX_RANK = 32
DTYPE_NAMES = (
    "float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool", "int16", "uint16", "uint32",
    "uint64", "bfloat16",
)  # fmt: skip
"""The dtypes that MXNet has, by code. Source: 3rdparty/mshadow/mshadow/base.h, `TypeFlag`."""


@dataclass(frozen=True)
class ArrayRecord:
    """One record.

    Attributes:
        generation: 0 to 3.
        device: Type and id.
        tensor: The array; None if it holds none.
        end: Offset of the first byte behind it.
    """

    generation: int
    device: tuple[int, int]
    tensor: Stored | None
    end: int


def read_record(fetch: Fetch, start: int, limit: int, name: str, place: str) -> ArrayRecord:
    """Reads the header of a record; its values are read when asked for.

    Args:
        fetch: Reads bytes of what the record lies in.
        start: Its first byte.
        limit: Where what it lies in ends.
        name: The array's name.
        place: The file.

    Raises:
        CorruptError: It reaches beyond `limit`.
        RefusedError: The array is sparse.
        FormatError: It breaks the format.
    """
    cursor = _Cursor(fetch, start, limit, f"{name} in {place}")
    first = cursor.number("<I")
    generation = GENERATIONS.get(first, 0)
    if generation >= 2 and (kind := cursor.number("<i")):
        raise RefusedError(
            "An array is sparse.", place=cursor.place, expected="dense values", found=f"storage type {kind}"
        )
    shape = cursor.sizes("<q" if generation else "<I", cursor.number("<i") if generation else first)
    if shape is None or (generation < 3 and not shape) or -1 in shape:
        return ArrayRecord(generation, CPU, None, cursor.at)
    device = (cursor.number("<i"), cursor.number("<i"))
    code = cursor.number("<i")
    if not 0 <= code < len(DTYPE_NAMES):
        raise FormatError("An array has an unknown dtype.", place=cursor.place, found=f"code {code}")
    dtype = DTYPES[DTYPE_NAMES[code]]
    size = math.prod(shape) * dtype.itemsize
    cursor.require(size)
    tensor = dense(name, place, dtype, shape, size, partial(_shifted, fetch, cursor.at))
    return ArrayRecord(generation, device, tensor, cursor.at + size)


def record_header(generation: int, device: tuple[int, int], shape: Shape, dtype: DType, name: str) -> bytes:
    """Returns what stands before an array's values in a record of generation 2 or 3.

    Raises:
        FormatError: No record holds such an array.
    """
    if dtype.name not in DTYPE_NAMES:
        raise FormatError(
            "MXNet has no such dtype.", place=name, expected=", ".join(DTYPE_NAMES), found=dtype.name
        )
    if generation < 3 and (not shape or 0 in shape):
        raise FormatError(
            "MXNet's legacy mode has no arrays of rank 0 or without values.",
            place=name,
            found=f"shape {shape}",
            remedy="write for numpy mode",
        )
    sizes = struct.pack(f"<i{len(shape)}q", len(shape), *shape)
    return (
        struct.pack("<Ii", _MAGIC[generation], 0)
        + sizes
        + struct.pack("<3i", *device, DTYPE_NAMES.index(dtype.name))
    )


def dense(
    name: str, place: str, dtype: DType, shape: Shape, size: int, fetch: Fetch, fortran: bool = False
) -> Stored:
    """Returns a dense little-endian tensor over bytes.

    Args:
        name: Its name.
        place: Its file.
        dtype: Type of its values.
        shape: Its shape.
        size: Bytes that there are.
        fetch: Reads of these.
        fortran: Whether the first axis is the fastest.
    """
    storage = Storage(name, place, dtype, size, fetch)
    order = shape if fortran else shape[::-1]
    steps = [int(n) for n in np.cumprod([1, *(max(n, 1) for n in order[:-1])], dtype=object)][: len(shape)]
    return window(storage, 0, shape, tuple(steps if fortran else steps[::-1]), dtype)


def _shifted(fetch: Fetch, by: int, start: int, count: int) -> Array:
    return fetch(by + start, count)


class _Cursor:
    """Where a header is being read."""

    def __init__(self, fetch: Fetch, at: int, limit: int, place: str) -> None:
        self._fetch, self.at, self._limit, self.place = fetch, at, limit, place

    def require(self, count: int) -> None:
        """Raises CorruptError if there aren't so many bytes left."""
        if count > self._limit - self.at:
            raise CorruptError(
                "An array reaches beyond its file.",
                place=self.place,
                expected=f"{count} bytes at byte {self.at}",
                found=f"{max(self._limit - self.at, 0)} bytes",
                remedy="copy the file again",
            )

    def number(self, code: str) -> int:
        """Reads one number."""
        size = struct.calcsize(code)
        self.require(size)
        raw = self._fetch(self.at, size).tobytes()
        self.at += size
        return int(struct.unpack(code, raw)[0])

    def sizes(self, code: str, rank: int) -> Shape | None:
        """Reads a shape; None where even the rank is unknown."""
        if rank == -1:
            return None
        if not 0 <= rank <= MAX_RANK:
            raise FormatError("An array has an impossible rank.", place=self.place, found=rank)
        shape = tuple(self.number(code) for _ in range(rank))
        if any(not -1 <= n < 2**40 for n in shape):
            raise FormatError("An array has an impossible shape.", place=self.place, found=shape)
        return shape
