"""The sorted table in which a TensorFlow checkpoint's index lies: keys and values in checked blocks.

A file is: data blocks; a metaindex block, empty here; an index block, whose values say where the data blocks lie; and
a footer of 48 bytes. A block is followed by a byte for its compression and a masked CRC-32C of both. Inside a block a
key is stored as the number of bytes that it shares with the one before, and the rest.
Source: google/leveldb, doc/table_format.md; tensorflow/tensorflow, core/lib/io/{format,block,table_builder}.cc.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NoReturn

from statekit.budget import NODE_BYTES, Account
from statekit.converters.formats.crc import crc32c
from statekit.errors import CorruptError, FormatError, RefusedError
from statekit.files.source import Held, short

MAGIC = 0xDB4775248B80FB57
FOOTER_BYTES = 48
_NAMES, _NODES = 3, 6
"""What an entry counts for: how often its key is held, as bytes, as a name and in what follows; values of a tree."""
_CHECKED = 64
"""Bytes of a block whose checksum takes a step."""
_TRAILER = 5
_MASK_DELTA = 0xA282EAD8
_RESTART_INTERVAL = 16
_BLOCK_BYTES = 256 * 2**10


def masked(crc: int) -> int:
    """Returns a CRC as it is stored: rotated and moved, so that the CRC of data with CRCs in it stays useful."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def read_table(data: bytes, place: object, account: Account | None = None) -> dict[bytes, bytes]:
    """Returns what a table holds, its checksums enforced.

    A key of a few bytes may stand for one of any length, most of which it shares with the one before.

    Args:
        data: The file.
        place: Its path.
        account: What it draws on; one of its own if None.

    Raises:
        BudgetError: Its keys and values are more than the job may hold, or its blocks are listed again and again.
        CorruptError: It is truncated, or a checksum doesn't fit.
        FormatError: It isn't a table, or breaks the format.
        RefusedError: Its blocks are compressed, which TensorFlow doesn't do.
    """
    if len(data) < FOOTER_BYTES:
        raise short(Held(data, f"{place}"), 0, FOOTER_BYTES)
    footer = data[-FOOTER_BYTES:]
    if struct.unpack("<Q", footer[-8:])[0] != MAGIC:
        raise CorruptError(
            "An index has no valid end: it is truncated, or another kind of file.", place=place
        )
    metaindex, at = _handle(footer, 0, place)
    _block(data, *metaindex, place)
    index, _ = _handle(footer, at, place)
    entries: dict[bytes, bytes] = {}
    last = b""
    taken = account or Account()
    for _, where in _entries(_block(data, *index, place), place, taken):
        handle, _ = _handle(where, 0, place)
        where_it_is = f"byte {handle[0]} of {place}"
        taken.step(1 + handle[1] // _CHECKED, "An index", where_it_is)
        for key, value in _entries(_block(data, *handle, place), place, taken):
            if entries and key <= last:
                raise FormatError("The keys of an index aren't in order.", place=place, found=key)
            count = _NAMES * len(key) + len(value) + _NODES * NODE_BYTES
            taken.hold(count, "What an index holds", where_it_is)
            entries[key], last = value, key
    return entries


def write_table(entries: Mapping[bytes, bytes]) -> bytes:
    """Returns a table of entries, byte for byte as TensorFlow writes it."""
    out, handles = bytearray(), []
    keys = sorted(entries)
    block = _BlockWriter(_RESTART_INTERVAL)
    for i, key in enumerate(keys):
        block.add(key, entries[key])
        after = keys[i + 1] if i + 1 < len(keys) else None
        if after is None or block.size >= _BLOCK_BYTES:
            handles.append((_successor(key) if after is None else _between(key, after), _put(out, block)))
            block = _BlockWriter(_RESTART_INTERVAL)
    metaindex = _put(out, _BlockWriter(_RESTART_INTERVAL))
    index = _BlockWriter(1)
    for key, handle in handles:
        index.add(key, handle)
    footer = metaindex + _put(out, index)
    return bytes(out) + footer.ljust(FOOTER_BYTES - 8, b"\0") + struct.pack("<Q", MAGIC)


def varint(data: bytes, at: int, place: object) -> tuple[int, int]:
    """Reads a varint at a position; returns it and the position behind it.

    Raises:
        FormatError: It leaves the data, or 64 bits.
    """
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80 and value < 2**64:
            return value, at
    raise FormatError("A number in an index is cut off or too long.", place=place)


def to_varint(value: int) -> bytes:
    """Returns a number, 0 or more, as a varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _handle(data: bytes, at: int, place: object) -> tuple[tuple[int, int], int]:
    offset, at = varint(data, at, place)
    size, at = varint(data, at, place)
    return (offset, size), at


def _block(data: bytes, offset: int, size: int, place: object) -> bytes:
    end = offset + size + _TRAILER
    if end > len(data) - FOOTER_BYTES:
        raise CorruptError("A block of an index lies outside the file.", place=place, found=f"byte {end}")
    block, kind = data[offset : end - _TRAILER], data[end - _TRAILER]
    stored = struct.unpack("<I", data[end - 4 : end])[0]
    if masked(crc32c(data[offset : end - 4])) != stored:
        raise CorruptError(
            "A block of an index doesn't fit its checksum.",
            place=place,
            found=f"block at byte {offset}",
            remedy="copy the checkpoint again",
        )
    if kind != 0:
        raise RefusedError("An index is compressed.", place=place, expected="compression 0", found=kind)
    return block


def _entries(block: bytes, place: object, account: Account) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 4:
        _broken(place)
    end = len(block) - 4 - 4 * struct.unpack("<I", block[-4:])[0]
    if end < 0:
        _broken(place)
    at, key = 0, b""
    while at < end:
        shared, at = varint(block, at, place)
        rest, at = varint(block, at, place)
        size, at = varint(block, at, place)
        if shared > len(key) or at + rest + size > end:
            _broken(place)
        account.step((shared + rest) // _CHECKED, "An index", f"{place}")  # a few bytes copy a long key
        key = key[:shared] + block[at : at + rest]
        yield key, block[at + rest : at + rest + size]
        at += rest + size


def _broken(place: object) -> NoReturn:
    raise FormatError("A block of an index breaks the format.", place=place)


class _BlockWriter:
    """A block in the making."""

    def __init__(self, interval: int) -> None:
        self._interval, self._data = interval, bytearray()
        self._restarts, self._since, self._last = [0], 0, b""

    @property
    def size(self) -> int:
        """Bytes so far, with the restarts."""
        return len(self._data) + 4 * len(self._restarts) + 4

    def add(self, key: bytes, value: bytes) -> None:
        shared = 0
        if self._since < self._interval:
            while shared < min(len(key), len(self._last)) and key[shared] == self._last[shared]:
                shared += 1
        else:
            self._restarts.append(len(self._data))
            self._since = 0
        self._data += to_varint(shared) + to_varint(len(key) - shared) + to_varint(len(value))
        self._data += key[shared:] + value
        self._since, self._last = self._since + 1, key

    def finished(self) -> bytes:
        """Returns the block."""
        return bytes(self._data) + struct.pack(
            f"<{len(self._restarts) + 1}I", *self._restarts, len(self._restarts)
        )


def _put(out: bytearray, block: _BlockWriter) -> bytes:
    """Appends a block with its trailer, and returns its handle."""
    body, at = block.finished() + b"\0", len(out)
    out += body + struct.pack("<I", masked(crc32c(body)))
    return to_varint(at) + to_varint(len(body) - 1)


def _between(key: bytes, after: bytes) -> bytes:
    """Returns a short key that is neither before `key` nor at `after` or beyond."""
    same = 0
    while same < min(len(key), len(after)) and key[same] == after[same]:
        same += 1
    if same < min(len(key), len(after)) and key[same] < 0xFF and key[same] + 1 < after[same]:
        return key[:same] + bytes([key[same] + 1])
    return key


def _successor(key: bytes) -> bytes:
    """Returns a short key that isn't before `key`."""
    for i, byte in enumerate(key):
        if byte != 0xFF:
            return key[:i] + bytes([byte + 1])
    return key
