"""What a TensorFlow checkpoint's index says of each tensor: protocol buffers, keys of slices, and string tensors.

A string tensor is stored as the lengths of its strings, a CRC of them, and the bytes.
Source: tensorflow/tensorflow, core/protobuf/tensor_bundle.proto, core/framework/tensor_slice.proto;
core/util/saved_tensor_slice_util.cc, `EncodeTensorNameSlice`; core/lib/strings/ordered_code.cc;
core/util/tensor_bundle/tensor_bundle.cc, `WriteStringTensor`, `ReadStringTensor`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from statekit.budget import Account
from statekit.converters.formats.crc import crc32c
from statekit.converters.formats.storage import MAX_RANK
from statekit.converters.formats.tensor_bundle.table import masked, to_varint, varint
from statekit.errors import CorruptError, FormatError
from statekit.tensors.slices import FULL, Extent, bounds
from statekit.tensors.tensor import DTYPES, DType, Shape, dtype_name

STRING = 7
_CODES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64",
    10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16", 22: "uint32", 23: "uint64",
    24: "float8_e5m2", 25: "float8_e4m3fn",
}  # fmt: skip
_NUMBERS = {name: code for code, name in _CODES.items()}


@dataclass(frozen=True)
class BundleEntry:
    """Where one tensor lies.

    Attributes:
        code: TensorFlow's number of the dtype.
        shape: The full shape.
        shard: Which data file.
        offset: First byte in it.
        size: Bytes.
        crc: Masked CRC-32C of them.
        slices: Of a partitioned variable: its parts, which have entries of their own. It has no bytes itself then.
    """

    code: int
    shape: Shape
    shard: int = 0
    offset: int = 0
    size: int = 0
    crc: int = 0
    slices: tuple[Extent, ...] = ()

    @property
    def dtype(self) -> DType | None:
        """The dtype; None for one that statekit doesn't carry."""
        return DTYPES[_CODES[self.code]] if self.code in _CODES else None


def code_of(dtype: DType) -> int | None:
    """Returns TensorFlow's number of a dtype, or None if it has none."""
    return _NUMBERS.get(dtype_name(dtype))


def parse_header(data: bytes, place: object) -> int:
    """Returns the number of data files.

    Raises:
        FormatError: It isn't a header, or the data is big-endian.
    """
    fields = dict(fields_of(data, place))
    if fields.get(2, 0) != 0:
        raise FormatError("The checkpoint's data is big-endian.", place=place, expected="little-endian")
    shards = fields.get(1, 0)
    if not isinstance(shards, int) or not 0 < shards < 100_000:
        raise FormatError("A checkpoint has an absurd number of data files.", place=place, found=shards)
    return shards


def header(shards: int) -> bytes:
    """Returns the header for a number of data files, of version 1, little-endian."""
    return b"\x08" + to_varint(shards) + b"\x1a\x02\x08\x01"


def parse_entry(data: bytes, place: object) -> BundleEntry:
    """Returns what the index says of one tensor.

    Raises:
        FormatError: It breaks the format, or sizes disagree.
    """
    values: dict[int, Any] = {1: 0, 2: b"", 3: 0, 4: 0, 5: 0, 6: 0}
    slices = []
    for number, value in fields_of(data, place):
        if number == 7:
            slices.append(value)
        elif number in values:
            values[number] = value
    if not isinstance(values[2], bytes) or not all(isinstance(values[n], int) for n in (1, 3, 4, 5, 6)):
        raise FormatError("An entry of an index breaks the format.", place=place)
    shape = _shape(values[2], place)
    parts = tuple(_extent(part, shape, place) for part in slices)
    entry = BundleEntry(values[1], shape, values[3], values[4], values[5], values[6], parts)
    if entry.dtype is not None and not parts and entry.size != math.prod(shape) * entry.dtype.itemsize:
        raise FormatError(
            "The size of a tensor isn't that of its shape.",
            place=place,
            expected=f"{math.prod(shape) * entry.dtype.itemsize} bytes for {entry.dtype} {shape}",
            found=f"{entry.size} bytes",
        )
    return entry


def entry_bytes(entry: BundleEntry) -> bytes:
    """Returns an entry as TensorFlow writes it; numbers that are 0 are left out."""
    dims = b"".join(field_of(2, field_of(1, size)) for size in entry.shape)
    out = field_of(1, entry.code) + field_of(2, dims) + field_of(3, entry.shard) + field_of(4, entry.offset)
    out += field_of(5, entry.size)
    if entry.crc:
        out += b"\x35" + struct.pack("<I", entry.crc)
    for extent in entry.slices:
        parts = [
            b"" if length == FULL else field_of(1, start) + b"\x10" + to_varint(length)
            for start, length in extent
        ]
        out += field_of(7, b"".join(field_of(1, part) for part in parts))
    return out


def slice_key(name: bytes, extent: Extent) -> bytes:
    """Returns the key under which a slice of a tensor has its entry."""
    out = _ordered_number(0) + _ordered_string(name) + _ordered_number(len(extent))
    for start, length in extent:
        out += _ordered_signed(start) + _ordered_signed(length)
    return out


def _shape(data: bytes, place: object) -> Shape:
    sizes = []
    for number, value in fields_of(data, place):
        if number == 3 and value:
            raise FormatError("A tensor has a shape of unknown rank.", place=place)
        if number == 2 and isinstance(value, bytes):
            sizes.append(dict(fields_of(value, place)).get(1, 0))
    sane = all(isinstance(size, int) and 0 <= size < 2**63 for size in sizes) and len(sizes) <= MAX_RANK
    if not sane or math.prod(max(size, 1) for size in sizes) >= 2**60:
        raise FormatError("A tensor has an absurd shape.", place=place, found=sizes[:MAX_RANK])
    return tuple(sizes)


def _extent(data: Any, shape: Shape, place: object) -> Extent:
    parts = [dict(fields_of(value, place)) for number, value in fields_of(data, place) if number == 1]
    if len(parts) != len(shape):
        raise FormatError("A slice has another rank than its tensor.", place=place, found=len(parts))
    extent = tuple((part.get(1, 0), part[2]) if 2 in part else (0, FULL) for part in parts)
    if not all(isinstance(number, int) for axis in extent for number in axis):
        raise FormatError("An entry of an index breaks the format.", place=place)
    for axis, size in zip(bounds(extent, shape), shape, strict=True):
        if not 0 <= axis.start <= axis.stop <= size:
            raise FormatError("A slice leaves its tensor.", place=place, expected=shape, found=extent)
    return extent


def fields_of(data: Any, place: object) -> Iterator[tuple[int, Any]]:
    """Yields number and value of each field: int for varint, fixed32 and fixed64, bytes for what has a length."""
    if not isinstance(data, bytes):
        raise FormatError("An entry of an index breaks the format.", place=place)
    at = 0
    while at < len(data):
        tag, at = varint(data, at, place)
        kind, size = tag & 7, {1: 8, 5: 4}.get(tag & 7)
        if kind == 0:
            value, at = varint(data, at, place)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = varint(data, at, place)
        if size is None or at + size > len(data):
            raise FormatError("An entry of an index breaks the format.", place=place)
        raw = data[at : at + size]
        yield tag >> 3, raw if kind == 2 else int.from_bytes(raw, "little")
        at += size


def field_of(number: int, value: int | bytes) -> bytes:
    """Returns a field as TensorFlow writes it: a number, but none that is 0, or what has a length."""
    if isinstance(value, bytes):
        return bytes([number << 3 | 2]) + to_varint(len(value)) + value
    return bytes([number << 3]) + to_varint(value) if value else b""


def _ordered_number(value: int) -> bytes:
    raw = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(raw)]) + raw


def _ordered_string(value: bytes) -> bytes:
    return value.replace(b"\xff", b"\xff\x00").replace(b"\x00", b"\x00\xff") + b"\x00\x01"


def _ordered_signed(value: int) -> bytes:
    """Encodes a number so that bytes sort as numbers do: n bytes begin with n ones, all inverted below 0."""
    magnitude = ~value if value < 0 else value
    size = magnitude.bit_length() // 7 + 1
    raw = bytearray(magnitude.to_bytes(max(size, 1), "big"))
    ones = (0xFFFF << (16 - size)) & 0xFFFF
    raw[0] |= ones >> 8
    if size > 8:
        raw[1] |= ones & 0xFF
    return bytes(byte ^ 0xFF for byte in raw) if value < 0 else bytes(raw)


def parse_strings(
    data: bytes, entry: BundleEntry, place: str, account: Account | None = None
) -> bytes | list[bytes]:
    """Returns a string, or a flat list of them if the tensor has axes.

    Args:
        data: The bytes of the tensor.
        entry: What the index says of it.
        place: Where it lies.
        account: What it draws on; one of its own if None.

    Raises:
        BudgetError: Its strings are more than the job may hold.
        CorruptError: The bytes don't fit their checksum, or their lengths.
        FormatError: A length breaks the format.
    """
    count = math.prod(entry.shape)
    if count > len(data):
        raise FormatError("A string tensor has an absurd shape.", place=place, found=entry.shape)
    taken = account or Account()
    taken.nodes(count, "A string tensor", place)
    taken.hold(len(data), "A string tensor", place)
    lengths, at = [], 0
    for _ in range(count):
        length, at = varint(data, at, place)
        lengths.append(length)
    end = at + 4
    if end + sum(lengths) != len(data):
        raise CorruptError("A string tensor has another size than it says.", place=place, found=len(data))
    if masked(crc32c(data[at:], _length_crc(lengths))) != entry.crc:
        raise CorruptError("A tensor's bytes don't fit their checksum.", place=place)
    strings = []
    for length in lengths:
        strings.append(data[end : end + length])
        end += length
    return strings if entry.shape else strings[0]


def string_bytes(strings: bytes | list[bytes]) -> tuple[bytes, int]:
    """Returns a string tensor as it is stored, and its CRC."""
    flat = [strings] if isinstance(strings, bytes) else strings
    lengths = struct.pack("<I", masked(_length_crc(map(len, flat))))
    body = lengths + b"".join(flat)
    return b"".join(to_varint(len(text)) for text in flat) + body, crc32c(body, _length_crc(map(len, flat)))


def _length_crc(lengths: Iterable[int]) -> int:
    """Returns the CRC of lengths, each as 4 bytes, or 8 from 2^32 on."""
    crc = 0
    for length in lengths:
        crc = crc32c(struct.pack("<I" if length < 2**32 else "<Q", length), crc)
    return crc
