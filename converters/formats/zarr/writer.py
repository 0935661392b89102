"""Writes zarr arrays of format 2 in the bytes T5X and Orbax would write, one chunk in memory."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from statekit.converters.formats.crc import crc32
from statekit.converters.formats.zarr.array import Header
from statekit.converters.formats.zarr.headers import header_json
from statekit.files.stage import Stage
from statekit.pipeline import in_turn, working
from statekit.tensors.digest import little_endian
from statekit.tensors.tensor import BLOCK_BYTES, Filled, Shape, Tensor, blocks, positions

CHUNK_BYTES = 64 * 2**20
"""The size above which T5X cuts an array. Source: T5X t5x/checkpoints.py, `_DESIRED_CHUNK_SIZE_BYTES`."""

_PART_BYTES = 16 * 2**20
_GZIP_HEADER = b"\x1f\x8b\x08" + bytes(5) + b"\x04\xff"
"""Of deflated data without name or time, compressed fast, on an unknown system."""


def chunk_shape(shape: Shape, itemsize: int, limit: int = CHUNK_BYTES) -> Shape:
    """Returns the chunk shape T5X chooses: the largest axis steps down its divisors until a chunk fits.

    Source: T5X t5x/checkpoints.py, `_choose_chunk_shape`.
    """
    chunk = [max(1, n) for n in shape]
    while math.prod(chunk) > max(1, limit // itemsize):
        axis = chunk.index(max(chunk))
        chunk[axis] = next(chunk[axis] // d for d in range(2, chunk[axis] + 1) if chunk[axis] % d == 0)
    return tuple(chunk)


def run_shape(shape: Shape, itemsize: int, limit: int = BLOCK_BYTES) -> Shape:
    """Returns the shape of chunks of at most `limit` bytes that are runs of an array in C order; the last may reach on.

    Such are written while the array passes by once: they are the blocks in which it streams.
    """
    axis = 0  # the first axis whose single row fits
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) * itemsize > limit:
        axis += 1
    rows = max(1, limit // max(1, math.prod(shape[axis + 1 :]) * itemsize))
    return tuple(1 if i < axis else max(1, min(n, rows) if i == axis else n) for i, n in enumerate(shape))


def header_for(tensor: Tensor, compressor: Literal["gzip", "zstd"], chunks: Shape) -> Header:
    """Returns the header under which a tensor is written: level 1, no fill value."""
    return Header(tensor.shape, chunks, tensor.dtype, compressor)


def header_bytes(header: Header) -> bytes:
    """Returns the content of `.zarray`."""
    return json.dumps(header_json(header), sort_keys=True, separators=(",", ":")).encode()


def encoded_chunks(
    stage: Stage, name: str, tensor: Tensor, header: Header
) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yields key and stored bytes of every chunk, and digests the tensor under its name.

    The bytes come in pieces, which must be taken before the next chunk is asked for.
    """
    stream = stage.stream(name, tensor)
    in_order = _in_order(header)
    pieces = _pieces(stream, header.chunk_bytes())

    def chunks() -> Iterator[tuple[str, Iterator[memoryview]]]:
        for position in positions([range(n) for n in header.grid()]):
            chunk = next(pieces) if in_order else _read_chunk(tensor, header, position)
            yield header.value_key(position), chunk

    if header.compressor == "zstd":
        whole = ((key, [*chunk]) for key, chunk in chunks())
        for key, packed in in_turn(partial(_zstandard, header.level), whole):
            yield key, iter((packed,))
    else:
        for key, chunk in chunks():
            yield key, _gzip(chunk, header)
    for _ in stream:  # chunks that aren't in C order were read by themselves
        pass


def _in_order(header: Header) -> bool:
    """Tells whether the chunks, one after the other, are the array in C order."""
    cut = [i for i, count in enumerate(header.grid()) if count > 1]
    return not cut or all(n == 1 for n in header.chunks[: cut[-1]])


def _read_chunk(tensor: Tensor, header: Header, position: tuple[int, ...]) -> Iterator[memoryview]:
    """Reads a chunk by itself, in parts."""
    for part in blocks(Filled(header.chunks, header.dtype), _PART_BYTES):
        starts = [i * c for i, c in zip(position, header.chunks, strict=True)]
        index = tuple(slice(n + s.start, n + s.stop) for n, s in zip(starts, part, strict=True))
        yield little_endian(tensor.read(index))


def _pieces(stream: Iterator[memoryview], size: int) -> Iterator[Iterator[memoryview]]:
    """Cuts a stream into chunks of `size` bytes, each a run of views of the stream's blocks; zeros fill up the last."""
    buffer = memoryview(b"")

    def chunk() -> Iterator[memoryview]:
        nonlocal buffer
        wanted = size
        while wanted:
            buffer = buffer if len(buffer) else next(stream, memoryview(bytes(min(wanted, BLOCK_BYTES))))
            yield buffer[:wanted]
            wanted, buffer = wanted - len(buffer[:wanted]), buffer[wanted:]

    while True:
        yield chunk()


def _deflating(level: int) -> Any:
    """Returns what makes gzip streams of a level: isal, where it is installed, for the level that is fast, or zlib.

    The streams differ, what is in them doesn't.
    """
    if level == 1 and find_spec("isal") is not None:
        from isal import isal_zlib

        return isal_zlib
    return zlib


def _gzip(chunk: Iterator[memoryview], header: Header) -> Iterator[bytes]:
    """Yields one gzip stream, whose pieces are compressed side by side.

    Each begins without what stood before it and ends at a byte, so that they are blocks of one stream.
    Source: RFC 1952, 2.3 (a header without name or time, CRC-32 and size at the end), RFC 1951, 3.2.4.
    """
    library, size = _deflating(header.level), header.chunk_bytes()

    def pieces() -> Iterator[tuple[memoryview, bool]]:
        left = size
        for piece in chunk:
            left -= len(piece)
            yield piece, left == 0

    def compress(piece: tuple[memoryview, bool]) -> tuple[memoryview, bytes]:
        data, is_last = piece
        with working("compress"):
            encoder = library.compressobj(header.level, zlib.DEFLATED, -15)
            return data, encoder.compress(data) + encoder.flush(
                zlib.Z_FINISH if is_last else zlib.Z_SYNC_FLUSH
            )

    yield _GZIP_HEADER
    crc = 0
    for data, packed in in_turn(compress, pieces()):  # while some are compressed, the next is read
        crc = crc32(data, crc)
        yield packed
    yield struct.pack("<II", crc, size % 2**32)


def _zstandard(level: int, chunk: tuple[str, list[memoryview]]) -> tuple[str, bytes]:
    """Compresses a chunk into one frame."""
    import zstandard

    key, pieces = chunk
    with working("compress"):
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return key, zstandard.ZstdCompressor(level=level).compress(data)
