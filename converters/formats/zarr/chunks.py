"""Decodes a stored chunk as a stream, so that a block costs its own size and not the chunk's.

Chunks of real checkpoints reach gigabytes (one device's shard of an array); a stream keeps a few MiB of one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import IO, Protocol, cast

import numpy as np

from statekit.converters.formats.zarr.stores import Value
from statekit.errors import CorruptError, RefusedError
from statekit.tensors.tensor import Array, Index, Shape, whole

PIECE = 2**20
"""How much is read from a file, and decoded, at a time. In bytes."""

SLAB = 8 * 2**20
"""How much of a chunk is held to cut a block out of it, in bytes. A chunk up to this size is always read to its end."""

_WBITS = {"gzip": 31, "zlib": 15}
_RATIO = {"gzip": 1032, "zlib": 1032, "zstd": 2**15}
"""The most bytes that one stored byte can stand for.

Source: deflate, 258 bytes for two bits (zlib.net/zlib_tech.html); zstd, 128 KiB for 4 bytes (RFC 8878, 3.1.1.2).
"""
_ZSTD_WINDOW = 2**25


class Stream(Protocol):
    """The values of one array or chunk, read forwards. Positions and sizes in bytes."""

    @property
    def position(self) -> int:
        """Where the next read begins."""

    def seek(self, position: int) -> None:
        """Moves forwards to a position."""

    def read_into(self, target: memoryview) -> None:
        """Fills a byte buffer."""


class RawStream:
    """Bytes that are stored as they are."""

    def __init__(self, value: Value) -> None:
        self._value = value
        self.position = 0

    def seek(self, position: int) -> None:
        """Moves to a position."""
        self.position = position

    def read_into(self, target: memoryview) -> None:
        for start in range(0, len(target), PIECE):
            count = min(PIECE, len(target) - start)
            target[start : start + count] = self._value.read_at(self.position, count)
            self.position += count


class DecodedStream:
    """A compressed chunk of `size` bytes when decoded."""

    def __init__(self, value: Value, compressor: str, size: int) -> None:
        self._pieces = _decoded(value, compressor)
        self._held = memoryview(b"")
        self._place = value.place
        self._size = size
        self.position = 0

    def seek(self, position: int) -> None:
        while self.position < position:
            held = self._more()[: position - self.position]
            self._used(len(held))

    def read_into(self, target: memoryview) -> None:
        filled = 0
        while filled < len(target):
            held = self._more()[: len(target) - filled]
            target[filled : filled + len(held)] = held
            filled += len(held)
            self._used(len(held))

    def finish(self) -> None:
        """Reads to the end, so that the chunk's length and its checksum are checked.

        Raises:
            CorruptError: There is more or less than declared, or the checksum disagrees.
        """
        self.seek(self._size)
        if len(self._held) or next(self._pieces, b""):
            raise CorruptError(
                "A chunk is longer than declared.", place=self._place, expected=f"{self._size} bytes"
            )

    def _used(self, count: int) -> None:
        self._held = self._held[count:]
        self.position += count

    def _more(self) -> memoryview:
        if not len(self._held):
            self._held = memoryview(next(self._pieces, b""))
            if not len(self._held):
                raise CorruptError(
                    "A chunk is shorter than declared.",
                    place=self._place,
                    expected=f"{self._size} bytes",
                    found=f"{self.position} bytes",
                )
        return self._held


def check_size(value: Value, compressor: str | None, size: int) -> None:
    """Compares a chunk's declared size with its stored one, before anything is allocated for it.

    Raises:
        CorruptError: An uncompressed chunk has another size.
        RefusedError: No data of this compression expands that far.
    """
    if compressor is None:
        if value.size != size:
            raise CorruptError(
                "A chunk has the wrong size.",
                place=value.place,
                expected=f"{size} bytes",
                found=f"{value.size} bytes",
            )
    elif size > value.size * _RATIO[compressor]:
        raise RefusedError(
            "A chunk declares more values than its bytes can hold.",
            place=value.place,
            expected=f"at most {value.size * _RATIO[compressor]} bytes from {value.size} bytes of {compressor}",
            found=f"{size} bytes",
            remedy="the chunk is cut off, or the header lies",
        )


def open_stream(value: Value, compressor: str | None, size: int) -> RawStream | DecodedStream:
    """Opens the stream of a chunk of `size` decoded bytes."""
    return RawStream(value) if compressor is None else DecodedStream(value, compressor, size)


def copy_block(stream: Stream, shape: Shape, index: Index, out: Array, start: int = 0) -> None:
    """Copies the block `index` of a C-order array of `shape`, which begins at byte `start` of a stream, to `out`.

    Reads forwards only and holds at most `SLAB` bytes besides, or the block where `out` isn't contiguous.
    """
    if out.size == 0:
        return
    row = math.prod(shape[1:]) * out.dtype.itemsize
    if index[1:] == whole(shape[1:]):
        stream.seek(start + (index[0].start * row if shape else 0))
        target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        stream.read_into(_bytes_of(target))
        if target is not out:
            out[...] = target
    elif row > SLAB:
        for i, n in enumerate(range(index[0].start, index[0].stop)):
            copy_block(stream, shape[1:], index[1:], out[i], start + n * row)
    else:
        for first in range(index[0].start, index[0].stop, max(1, SLAB // row)):
            last = min(first + max(1, SLAB // row), index[0].stop)
            slab = np.empty((last - first, *shape[1:]), out.dtype)
            stream.seek(start + first * row)
            stream.read_into(_bytes_of(slab))
            out[first - index[0].start : last - index[0].start] = slab[(slice(None), *index[1:])]


def first_byte(shape: Shape, index: Index, itemsize: int) -> int:
    """Returns where `copy_block` begins to read."""
    if not shape:
        return 0
    row = math.prod(shape[1:]) * itemsize
    inner = first_byte(shape[1:], index[1:], itemsize) if row > SLAB else 0
    return int(index[0].start) * row + inner


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _decoded(value: Value, compressor: str) -> Iterator[bytes]:
    return _unzstd(value) if compressor == "zstd" else _inflated(value, _WBITS[compressor])


def _inflated(value: Value, wbits: int) -> Iterator[bytes]:
    decoder, offset = zlib.decompressobj(wbits), 0
    try:
        while offset < value.size and not decoder.eof:
            data = value.read_at(offset, min(PIECE, value.size - offset))
            offset += len(data)
            while piece := decoder.decompress(data, PIECE):
                yield piece
                data = decoder.unconsumed_tail
    except zlib.error as error:
        raise CorruptError("A chunk is damaged.", place=value.place, found=str(error)) from error
    if not decoder.eof or decoder.unused_data or offset < value.size:
        found = "bytes after the end of the data" if decoder.eof else "the data ends too early"
        raise CorruptError("A chunk is damaged.", place=value.place, found=found)


def _unzstd(value: Value) -> Iterator[bytes]:
    import zstandard

    reader = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(
        cast(IO[bytes], _File(value)), read_size=PIECE
    )
    try:
        while piece := reader.read(PIECE):
            yield piece
    except zstandard.ZstdError as error:
        raise CorruptError("A chunk is damaged.", place=value.place, found=str(error)) from error


class _File:
    """The part of a file's interface that zstandard reads through."""

    def __init__(self, value: Value) -> None:
        self._value = value
        self._offset = 0

    def read(self, count: int) -> bytes:
        data = self._value.read_at(self._offset, min(count, self._value.size - self._offset))
        self._offset += len(data)
        return data
