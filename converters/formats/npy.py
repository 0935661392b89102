"""NumPy's files: `.npy`, one array behind a header; and npz, a zip archive of them.

The header is a Python literal: {'descr': '<f4', 'fortran_order': False, 'shape': (4, 6), }.
Source: NumPy, numpy/lib/format.py; numpy/lib/_npyio_impl.py, `savez`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from statekit.converters.formats.storage import MAX_RANK, dense
from statekit.converters.formats.zip_archive import Archive
from statekit.errors import CorruptError, FormatError
from statekit.files.checksums import ZIP
from statekit.files.source import Source, bytes_at
from statekit.tensors.tensor import DTYPES, Array, DType, Shape, Stored
from statekit.tensors.tree import Record

SUFFIX = ".npy"
MAGIC = b"\x93NUMPY"
ZIP_MAGIC = b"PK\3\4"
MAX_HEADER = 2**16
"""Bytes of a header at most; only those of structured dtypes have more.

Source: numpy/lib/format.py, "Format Version 2.0".
"""
USUAL_HEADER = 128
"""Bytes that hold the header of nearly every array."""
BFLOAT16 = "bfloat16"
ANY_DTYPE: Mapping[str, DType] = {
    **{dtype.str: dtype for dtype in DTYPES.values() if dtype.kind != "V"},
    **dict.fromkeys(("<V2", "|V2"), DTYPES[BFLOAT16]),
}
"""By description, dtypes of numbers. NumPy has no text for bfloat16: two bytes without a type are that."""


def is_npz(head: bytes) -> bool:
    """Tells whether a file is a zip archive whose first member is an array, by its first bytes."""
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return head.startswith(ZIP_MAGIC) and name.endswith(SUFFIX.encode())


@dataclass(frozen=True)
class NpyBytes:
    """The bytes of a .npy file: all of a source, or a member of an archive.

    Attributes:
        source: Where they are.
        start: Their first byte.
        size: How many there are.
        fetch: Reads of them: (first byte, count) -> (count,) uint8.
        head: Reads the first of them: count -> bytes.
        checksum: The checksum that `fetch` compares.
    """

    source: Source
    start: int
    size: int
    fetch: Callable[[int, int], Array]
    head: Callable[[int], bytes]
    checksum: str = ""

    @staticmethod
    def of(source: Source) -> NpyBytes:
        """Returns the bytes of a whole source."""
        return NpyBytes(source, 0, source.size, source.read, partial(bytes_at, source, 0))


def npz_arrays(
    source: Source, dtypes: Mapping[str, DType], deflated: bool = False
) -> dict[str, Stored | Record]:
    """Returns the arrays of an archive by name, without their values.

    Args:
        source: The archive.
        dtypes: By description, the dtypes that it may have; an array of another becomes a record of that.
        deflated: Whether members may be; those are inflated here, and held.

    Raises:
        CorruptError: Sizes or checksums disagree with the data.
        FormatError: A member is no array, or breaks the format.
    """
    archive = Archive(source, deflated)
    arrays: dict[str, Stored | Record] = {}
    for member in archive.members.values():
        if not member.name.endswith(SUFFIX):
            raise FormatError("A member of an npz is not an array.", place=f"{member.name} in {source.place}")
        if member.packed is None:
            fetch = partial(archive.read, member.name)
            head = partial(bytes_at, source, member.start)
            stored = NpyBytes(source, member.start, member.size, fetch, head, ZIP)
        else:
            whole = archive.record(member.name, "An array of an npz")
            stored = NpyBytes(
                source, member.start, member.size, partial(_held, whole), partial(_first, whole)
            )
        name = member.name.removesuffix(SUFFIX)
        arrays[name] = read_npy(stored, name, f"{member.name} in {source.place}", dtypes)
    return arrays


def _held(whole: bytes, start: int, count: int) -> Array:
    return np.frombuffer(whole, np.uint8)[start : start + count]


def _first(whole: bytes, count: int) -> bytes:
    return whole[:count]


def read_npy(stored: NpyBytes, name: str, place: str, dtypes: Mapping[str, DType]) -> Stored | Record:
    """Returns an array without its values.

    Args:
        stored: Its bytes.
        name: Its name.
        place: Where it is, for errors.
        dtypes: By description, the dtypes that it may have; what has another becomes a record of that.

    Raises:
        CorruptError: Its size isn't what its header says.
        FormatError: It breaks the format.
    """
    size = stored.size
    head = stored.head(min(size, USUAL_HEADER))
    begin = 12 if head[6:7] > b"\x01" else 10
    if not head.startswith(MAGIC) or len(head) < 12 or head[6] > 3:
        raise FormatError("An array is no .npy file.", place=place)
    length = int.from_bytes(head[8:begin], "little")
    if length > min(MAX_HEADER, size - begin):
        raise CorruptError("The header of an array is cut off.", place=place, found=length)
    if begin + length > len(head):
        head = stored.head(begin + length)
    description, shape, fortran = _described(head[begin : begin + length], place)
    dtype = dtypes.get(description) if isinstance(description, str) else None
    if dtype is None:
        return Record("numpy.ndarray", (str(description)[:80], shape))
    values = math.prod(shape) * dtype.itemsize
    if begin + length + values != size:
        raise CorruptError(
            "An array has another size than its header says.",
            place=place,
            expected=f"{values} bytes",
            found=f"{size - begin - length} bytes",
        )
    fetch = partial(_shifted, stored.fetch, begin + length)
    return dense(name, stored.source.place, dtype, shape, values, fetch, fortran, stored.checksum)


def _shifted(fetch: Callable[[int, int], Array], by: int, start: int, count: int) -> Array:
    return fetch(by + start, count)


def _described(raw: bytes, place: str) -> tuple[Any, Shape, bool]:
    """Reads the header of a .npy file, a Python literal."""
    try:
        return _parsed(raw) if len(raw) <= USUAL_HEADER else _parsed.__wrapped__(raw)
    except (SyntaxError, ValueError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise FormatError(
            "The header of an array breaks the format.",
            place=place,
            expected="descr, fortran_order, shape",
            found=f"{type(error).__name__}: {str(error)[:200]}",
        ) from None


@lru_cache(256)
def _parsed(raw: bytes) -> tuple[Any, Shape, bool]:
    """Parses a header; the arrays of one archive have few that differ."""
    head = ast.literal_eval(raw.decode("latin1").strip())
    description, shape, fortran = head["descr"], head["shape"], head["fortran_order"]
    plain = type(shape) is tuple and all(type(n) is int and 0 <= n < 2**40 for n in shape)
    if type(fortran) is not bool or not plain or len(shape) > MAX_RANK:
        raise ValueError(f"shape {shape!r:.80}")
    return description, shape, fortran
