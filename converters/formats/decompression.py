"""What is compressed, as a stream of pieces: of zip archives, zarr's chunks and HDF5's filters, drawing on the budget.

A stream keeps a few MiB, however much comes out of it. What came out is counted for the whole job, so that no number of
small files becomes more than their bytes explain.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from statekit.errors import CorruptError
from statekit.files.source import Source, as_file, byte_of, bytes_at
from statekit.pipeline import working
from statekit.tensors.tensor import Array

_checked: Any
try:
    from isal import isal_zlib as _checked
except ImportError:
    _checked = zlib

PIECE = 2**20
"""How much is read from a file, and decompressed, at a time. In bytes."""
DEFLATE, GZIP, ZLIB, ZSTD = "deflate", "gzip", "zlib", "zstd"
_WBITS = {DEFLATE: -15, GZIP: 31, ZLIB: 15}
MOST_OF_ONE = {DEFLATE: 1032, GZIP: 1032, ZLIB: 1032, ZSTD: 2**15}
"""The most bytes that one stored byte can stand for.

Source: deflate, 258 bytes for two bits (zlib.net/zlib_tech.html); zstd, 128 KiB for 4 bytes (RFC 8878, 3.1.1.2).
"""
_DEFLATE_WINDOW = 2**15
_GZIP_FLAGS, _GZIP_RESERVED = 3, 0xE0
"""Where flags stand in gzip's header, and which are reserved."""
_ZLIB_WINDOW = 7
"""The most that a header may say of the window: the logarithm of its bytes, less 8."""
_ZSTD_HEADER = 18
"""The longest header of a frame, in bytes. Source: RFC 8878, 3.1.1.1."""
_BLOCK_HEADER = 3
_BLOCKS_AT_ONCE = 4096
"""Bytes that are read where a block's header is, and blocks whose work is counted together."""


def decompressed(value: Source, compressor: str, what: str) -> Iterator[bytes]:
    """Yields what a compressed run of bytes stands for, in pieces of at most `PIECE` bytes.

    Args:
        value: The compressed bytes; all of them.
        compressor: `deflate`, `gzip`, `zlib` or `zstd`.
        what: What it is, as an error begins: `A chunk`.

    Raises:
        CorruptError: They are damaged, or something stands behind them.
        BudgetError: They become more than the bytes explain that are stored.
    """
    pieces = _unzstd(value, what) if compressor == ZSTD else _inflated(value, compressor, what)
    while piece := _decoded(pieces):
        value.account.decode(len(piece), what, byte_of(value, 0))
        yield piece


def _decoded(pieces: Iterator[bytes]) -> bytes:
    with working("decompress"):
        return next(pieces, b"")


def stream_bytes(value: Source, compressor: str, size: int) -> int:
    """Returns how many bytes a stream needs in memory that `size` bytes come out of.

    Raises:
        CorruptError: What is compressed has no header.
    """
    window = _zstd_window(value) if compressor == ZSTD else _DEFLATE_WINDOW
    return min(PIECE, value.size) + min(PIECE, size) + min(window, size)


def decompress_into(out: Array, value: Source, compressor: str, what: str) -> int:
    """Fills an array of bytes with what a compressed run of bytes stands for; returns how many that are.

    Raises:
        CorruptError: They are damaged, or more than the array holds.
        BudgetError: As `decompressed` raises it.
    """
    filled, target = 0, out.data
    if compressor == ZSTD:
        return _unzstd_into(target, value, what)
    for piece in decompressed(value, compressor, what):
        if filled + len(piece) > len(target):
            raise _longer(value, len(target), what)
        target[filled : filled + len(piece)] = piece
        filled += len(piece)
    return filled


def _inflated(value: Source, compressor: str, what: str) -> Iterator[bytes]:
    """Yields what deflate's bytes stand for; by isal, where it is installed and a checksum stands behind the data.

    Source: RFC 1952, 2.3.1.2: reserved flags of a header must be zero, and RFC 1950, 2.2: CINFO above 7 isn't allowed;
    isal compares neither. In 19 000 streams with one flipped bit it differs from zlib in nothing else.
    """
    if compressor == GZIP and value.size > _GZIP_FLAGS and value.read(_GZIP_FLAGS, 1)[0] & _GZIP_RESERVED:
        raise _damaged(value, what, "unknown header flags set")
    if compressor == ZLIB and value.size and value.read(0, 1)[0] >> 4 > _ZLIB_WINDOW:
        raise _damaged(value, what, "invalid window size")
    library = zlib if compressor == DEFLATE else _checked
    decoder, offset = library.decompressobj(_WBITS[compressor]), 0
    try:
        while offset < value.size and not decoder.eof:
            data = bytes_at(value, offset, min(PIECE, value.size - offset))
            offset += len(data)
            while piece := decoder.decompress(data, PIECE):
                yield piece
                data = decoder.unconsumed_tail
    except (zlib.error, _checked.error) as error:
        raise _damaged(value, what, str(error)) from error
    if not decoder.eof or decoder.unused_data or offset < value.size:
        fault = "bytes after the end of the data" if decoder.eof else "the data ends too early"
        raise _damaged(value, what, fault)


def _zstd_window(value: Source) -> int:
    import zstandard

    try:
        header = bytes_at(value, 0, min(_ZSTD_HEADER, value.size))
        return int(zstandard.get_frame_parameters(header).window_size)
    except zstandard.ZstdError as error:
        raise _damaged(value, "Compressed data", str(error)) from error


def _unzstd(value: Source, what: str) -> Iterator[bytes]:
    with _zstd_reader(value, what) as reader:
        while piece := reader.read(PIECE):
            yield piece
    _check_one_frame(value, what)


def _unzstd_into(target: memoryview, value: Source, what: str) -> int:
    """Fills a target without a copy between; returns how many bytes there are."""
    filled = 0
    with _zstd_reader(value, what) as reader, working("decompress"):
        while filled < len(target) and (count := reader.readinto(target[filled : filled + PIECE])):
            value.account.decode(count, what, byte_of(value, 0))
            filled += count
        if reader.read(1):
            raise _longer(value, len(target), what)
    _check_one_frame(value, what)
    return filled


@contextmanager
def _zstd_reader(value: Source, what: str) -> Iterator[Any]:
    import zstandard

    window = max(_zstd_window(value), 2**10)
    if window > 2**zstandard.WINDOWLOG_MAX:
        raise _damaged(value, what, f"a window of {window} bytes, which zstd's library can't have")
    decompressor = zstandard.ZstdDecompressor(max_window_size=window)
    try:
        yield decompressor.stream_reader(cast(IO[bytes], as_file(value)), read_size=PIECE)
    except zstandard.ZstdError as error:
        raise _damaged(value, what, str(error)) from error


def _check_one_frame(value: Source, what: str) -> None:
    """Compares the end of a frame with that of the bytes, which the library's reader doesn't.

    Source: RFC 8878, 3.1.1: a header, blocks each behind 3 bytes (of which one bit says that it is the last, two what
    it is, 1 being a byte that is repeated, and the rest its size), and 4 bytes of checksum where the header says so.

    Raises:
        CorruptError: The frame is cut off, or something stands behind it.
        BudgetError: It has more blocks than its bytes explain.
    """
    import zstandard

    header = bytes_at(value, 0, min(_ZSTD_HEADER, value.size))
    at, is_last, count = zstandard.frame_header_size(header), False, 0
    with io.BufferedReader(as_file(value), _BLOCKS_AT_ONCE) as file:
        while not is_last and at + _BLOCK_HEADER <= value.size:
            file.seek(at)
            block = int.from_bytes(file.read(_BLOCK_HEADER), "little")
            is_last, size = bool(block & 1), 1 if block >> 1 & 3 == 1 else block >> 3
            at, count = at + _BLOCK_HEADER + size, count + 1
            if count % _BLOCKS_AT_ONCE == 0:
                value.account.step(_BLOCKS_AT_ONCE, what, byte_of(value, at))
    at += 4 * zstandard.get_frame_parameters(header).has_checksum
    if not is_last or at > value.size:
        raise _damaged(value, what, "the data ends too early")
    if at < value.size:
        raise _damaged(value, what, "bytes after the end of the data")


def _longer(value: Source, size: int, what: str) -> CorruptError:
    return CorruptError(f"{what} is longer than declared.", place=byte_of(value, 0), expected=f"{size} bytes")


def _damaged(value: Source, what: str, fault: str) -> CorruptError:
    return CorruptError(f"{what} is damaged.", place=byte_of(value, 0), found=fault)
