"""Writes a tree as Flax' msgpack, byte for byte as `flax.serialization.to_bytes` does, without holding an array.

Sequences are maps with the keys "0", "1", ..., as `to_state_dict` makes them. So is what is empty, None included: Orbax
stores an empty NamedTuple as None, and Flax restores one from an empty map only.
Source: google/flax flax/serialization.py, `_msgpack_ext_pack`, `_ndarray_to_bytes`, `_chunk`; msgpack spec.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping

import msgpack

from statekit.converters.formats.msgpack.reader import CHUNKED
from statekit.errors import UsageError
from statekit.files.stage import Stage
from statekit.tensors.tensor import DType, Stored, Tensor, nbytes
from statekit.tensors.tree import Path, Tree

MAX_CHUNK = 2**30
"""Arrays of more bytes are cut. Source: flax/serialization.py, `MAX_CHUNK_SIZE`."""
NUMBER, SCALAR = "a number of Python", "a scalar of NumPy"
"""Notes of tensors of rank 0 that aren't arrays in the file."""
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_FIXED = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
_GATHERED = 2**20


def packed(tree: Tree, stage: Stage, path: Path = ()) -> Iterator[bytes | memoryview]:
    """Yields a tree as msgpack; tensors stream through the stage.

    Raises:
        UsageError: The tree holds what Flax can't.
    """
    if isinstance(tree, Tensor):
        yield from _tensor(tree, stage, "/".join(map(str, path)))
    elif isinstance(tree, (Mapping, list, tuple)) or tree is None:
        items = tree if isinstance(tree, Mapping) else dict(enumerate(tree or ()))
        yield msgpack.Packer().pack_map_header(len(items))
        for key, child in items.items():
            yield msgpack.packb(str(key))
            yield from packed(child, stage, (*path, key))
    elif isinstance(tree, (float, str, bytes)) or (isinstance(tree, int) and -(2**63) <= tree < 2**64):
        yield msgpack.packb(tree)
    else:
        raise UsageError(
            "A Flax checkpoint can't hold this value.",
            place="/".join(map(str, path)),
            expected="arrays, numbers of at most 64 bits, text, bytes, None and containers",
            found=type(tree).__name__,
        )


def gathered(blocks: Iterable[bytes | memoryview]) -> Iterator[bytes | bytearray | memoryview]:
    """Joins small blocks to about a MiB, because each write of a stage's file is a system call."""
    pending = bytearray()
    for block in blocks:
        if len(pending) + len(block) < _GATHERED:
            pending += block
        else:
            yield pending
            yield block
            pending = bytearray()
    yield pending


def _tensor(tensor: Tensor, stage: Stage, name: str) -> Iterator[bytes | memoryview]:
    blocks = stage.stream(name, tensor)
    note = tensor.note if isinstance(tensor, Stored) else ""
    if note == NUMBER:
        number = tensor.read().item()
        for _ in blocks:  # streamed for its digest only
            pass
        complex_ = isinstance(number, complex)
        yield msgpack.packb(_pair(number) if complex_ else number)
    elif nbytes(tensor) > MAX_CHUNK:
        yield from _chunked(tensor, blocks)
    else:
        yield from _array(tensor.shape, tensor.dtype, blocks, _SCALAR if note == SCALAR else _ARRAY)


def _pair(number: complex) -> msgpack.ExtType:
    return msgpack.ExtType(_COMPLEX, msgpack.packb((number.real, number.imag)))


def _array(
    shape: tuple[int, ...], dtype: DType, blocks: Iterable[bytes | memoryview], code: int = _ARRAY
) -> Iterator[bytes | memoryview]:
    """Yields the extension [shape, dtype, bytes]."""
    size = math.prod(shape) * dtype.itemsize
    packer = msgpack.Packer()
    head = packer.pack_array_header(3) + msgpack.packb(list(shape)) + msgpack.packb(dtype.name)
    head += _sized(size, (0xC4, 0xC5, 0xC6))
    whole = len(head) + size
    yield bytes([_FIXED[whole]]) if whole in _FIXED else _sized(whole, (0xC7, 0xC8, 0xC9))
    yield bytes([code]) + head
    yield from blocks


def _chunked(tensor: Tensor, blocks: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    """Yields an array in flat pieces of `MAX_CHUNK` bytes."""
    count, item = nbytes(tensor) // tensor.dtype.itemsize, tensor.dtype.itemsize
    length = MAX_CHUNK // item
    starts = range(0, count, length)
    packer = msgpack.Packer()
    yield packer.pack_map_header(3)
    yield msgpack.packb(CHUNKED) + msgpack.packb(True)
    yield msgpack.packb("shape") + msgpack.packb({str(i): n for i, n in enumerate(tensor.shape)})
    yield msgpack.packb("chunks") + packer.pack_map_header(len(starts))
    rest = memoryview(b"")
    for i, start in enumerate(starts):
        left = min(length, count - start) * item
        yield msgpack.packb(str(i))
        yield from _array((left // item,), tensor.dtype, ())
        while left:
            rest = rest or next(blocks)
            piece, rest = rest[:left], rest[left:]
            left -= len(piece)
            yield piece
    for _ in blocks:  # the stream ends, and so is digested
        pass


def _sized(size: int, heads: tuple[int, int, int]) -> bytes:
    """Returns a head with the shortest length that holds a size."""
    for head, form, limit in zip(heads, (">B", ">H", ">I"), (2**8, 2**16, 2**32), strict=True):
        if size < limit:
            return bytes([head]) + struct.pack(form, size)
    raise UsageError("msgpack can't hold so much at once.", expected="below 2^32 bytes", found=size)
