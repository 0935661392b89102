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
from dataclasses import dataclass

from statekit.converters.formats.storage import dense
from statekit.errors import FormatError, RefusedError
from statekit.files.source import Part, Source, bytes_at, require
from statekit.tensors.tensor import DTYPES, DType, Shape, Stored

GENERATIONS = {0xF993FAC8: 1, 0xF993FAC9: 2, 0xF993FACA: 3}
_MAGIC = {generation: magic for magic, generation in GENERATIONS.items()}
CPU = (1, 0)
"""Device type and id of the first CPU. Source: include/mxnet/base.h, `Context`."""
MAX_RANK = 32
"""Axes of an array at most. Source: NumPy 1, `NPY_MAXDIMS`, to which MXNet's arrays go."""
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


def read_record(source: Source, start: int, name: str) -> ArrayRecord:
    """Reads the header of a record; its values are read when asked for.

    Args:
        source: What the record lies in.
        start: Its first byte.
        name: The array's name.

    Raises:
        CorruptError: The source ends before.
        RefusedError: The array is sparse.
        FormatError: It breaks the format.
    """
    cursor = _Cursor(source, start, name)
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
    require(source, cursor.at, size)
    tensor = dense(name, source.place, dtype, shape, size, Part(source, cursor.at, size).read)
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


class _Cursor:
    """Where a header is being read."""

    def __init__(self, source: Source, at: int, name: str) -> None:
        self._source, self.at, self.place = source, at, f"{name} in {source.place}"

    def number(self, code: str) -> int:
        """Reads one number."""
        size = struct.calcsize(code)
        raw = bytes_at(self._source, self.at, size)
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
