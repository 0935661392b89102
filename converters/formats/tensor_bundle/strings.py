"""String tensors in TensorFlow's checkpoints: the lengths, a CRC of them, the bytes.

Source: tensorflow/tensorflow, core/util/tensor_bundle/tensor_bundle.cc, `WriteStringTensor`, `ReadStringTensor`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

from statekit.converters.formats.crc32c import crc32c
from statekit.converters.formats.tensor_bundle.entries import Entry
from statekit.converters.formats.tensor_bundle.table import masked, to_varint, varint
from statekit.errors import CorruptError, FormatError


def parse_strings(data: bytes, entry: Entry, place: str) -> bytes | list[bytes]:
    """Returns a string, or a flat list of them if the tensor has axes.

    Raises:
        CorruptError: The bytes don't fit their checksum, or their lengths.
        FormatError: A length breaks the format.
    """
    count = math.prod(entry.shape)
    if count > len(data):
        raise FormatError("A string tensor has an absurd shape.", place=place, found=entry.shape)
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
    return b"".join(to_varint(len(one)) for one in flat) + body, crc32c(body, _length_crc(map(len, flat)))


def _length_crc(lengths: Iterable[int]) -> int:
    """Returns the CRC of lengths, each as 4 bytes, or 8 from 2^32 on."""
    crc = 0
    for length in lengths:
        crc = crc32c(struct.pack("<I" if length < 2**32 else "<Q", length), crc)
    return crc
