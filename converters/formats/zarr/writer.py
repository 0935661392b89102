"""Writes zarr arrays of format 2 in the bytes T5X and Orbax would write, one chunk in memory."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Literal

from statekit.converters.formats.zarr.array import Header
from statekit.converters.formats.zarr.headers import header_json
from statekit.files.stage import Stage
from statekit.pipeline import lane, working
from statekit.tensors.digest import little_endian
from statekit.tensors.tensor import Filled, Shape, Tensor, blocks, positions

CHUNK_BYTES = 64 * 2**20
"""The size above which T5X cuts an array. Source: T5X t5x/checkpoints.py, `_DESIRED_CHUNK_SIZE_BYTES`."""

_PART_BYTES = 16 * 2**20


def chunk_shape(shape: Shape, itemsize: int, limit: int = CHUNK_BYTES) -> Shape:
    """Returns the chunk shape T5X chooses: the largest axis steps down its divisors until a chunk fits.

    Source: T5X t5x/checkpoints.py, `_choose_chunk_shape`.
    """
    chunk = [max(1, n) for n in shape]
    while math.prod(chunk) > max(1, limit // itemsize):
        axis = chunk.index(max(chunk))
        chunk[axis] = _next_divisor(chunk[axis])
    return tuple(chunk)


def _next_divisor(n: int) -> int:
    return next(n // d for d in range(2, n + 1) if n % d == 0)


def header_for(tensor: Tensor, compressor: Literal["gzip", "zstd"], limit: int = CHUNK_BYTES) -> Header:
    """Returns the header under which a tensor is written: level 1, no fill value, chunks of at most `limit` bytes."""
    return Header(
        tensor.shape, chunk_shape(tensor.shape, tensor.dtype.itemsize, limit), tensor.dtype, compressor
    )


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
    for position in positions([range(n) for n in header.grid()]):
        chunk = next(pieces) if in_order else _read_chunk(tensor, header, position)
        yield header.value_key(position), _compressed(chunk, header)
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
    """Cuts a stream into chunks of `size` bytes, each a run of views of the stream's blocks."""
    buffer = memoryview(b"")

    def chunk() -> Iterator[memoryview]:
        nonlocal buffer
        wanted = size
        while wanted:
            buffer = buffer if len(buffer) else memoryview(next(stream))
            yield buffer[:wanted]
            wanted, buffer = wanted - len(buffer[:wanted]), buffer[wanted:]

    while True:
        yield chunk()


def _deflating(level: int) -> Any:
    """Returns what makes gzip streams of a level: isal, where it is installed, for the level that is fast, or zlib.

    The streams differ, what is in them doesn't. Readers keep to zlib, which refuses flags of a header that isal lets
    pass, and is about as fast.
    """
    if level == 1 and find_spec("isal") is not None:
        from isal import isal_zlib

        return isal_zlib
    return zlib


def _compressed(chunk: Iterator[memoryview], header: Header) -> Iterator[bytes]:
    encoder: Any
    if header.compressor == "zstd":
        import zstandard

        encoder = zstandard.ZstdCompressor(level=header.level).compressobj(size=header.chunk_bytes())
    else:
        encoder = _deflating(header.level).compressobj(
            header.level, zlib.DEFLATED, 31
        )  # its header names no time

    def compress(piece: memoryview) -> bytes:
        with working("compress"):
            return bytes(encoder.compress(piece))

    compressed: Callable[[], bytes] | None = None
    for piece in chunk:  # while one is compressed, the next is read and the last one written
        coming = lane("compress", compress, piece)
        if compressed is not None:
            yield compressed()
        compressed = coming
    if compressed is not None:
        yield compressed()
    yield encoder.flush()
