"""Reads the chunks of HDF5 data sets that went through filters: no more comes out of one than it declares.

A chunk is decoded into the bytes that it shall have, once, and kept for the next block while the job's budget has room
for it.
Source: The HDF Group, HDF5 File Format Specification 3.0, IV.A.2.l "The Data Storage - Filter Pipeline Message", and
the library's H5Zshuffle.c and H5checksum.c (`H5_checksum_fletcher32`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from statekit.budget import CHUNK_STEPS, NODE_BYTES, TINY
from statekit.converters.formats.storage import PIECE, ZLIB, decompress_into, stream_bytes
from statekit.errors import CorruptError
from statekit.files.source import Held, Part, Source, byte_of, bytes_at, hold
from statekit.tensors.tensor import Array, DType, Index, Shape, index_shape, touched_chunks

DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
FILTERS_READ = {DEFLATE: "deflate", SHUFFLE: "shuffle", FLETCHER32: "fletcher32"}
"""Numbers of the filters that are read, and their names."""
_SUM_BYTES, _SUMMED = 4, 65535
_FEW = 256
"""Chunks of a block up to which their work isn't counted."""


class StoredChunk(NamedTuple):
    """A chunk: where it is in the grid, in elements, where it lies, its bytes, and a bit for each filter left out."""

    offset: tuple[int, ...]
    address: int
    size: int
    mask: int


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of one data set.

    Attributes:
        source: The file.
        listed: Lists every chunk that is stored.
        shape: The data set's shape.
        chunks: That of a chunk.
        dtype: How values are stored.
        filters: The filters in the order in which they were applied, each with its first parameter.
        what: What errors call the data set.
    """

    source: Source
    listed: Callable[[], Iterator[StoredChunk]] = field(repr=False)
    shape: Shape
    chunks: Shape
    dtype: DType
    filters: tuple[tuple[int, int], ...]
    what: str
    _listing: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def _size(self) -> int:
        return math.prod(self.chunks) * self.dtype.itemsize

    def read(self, index: Index) -> Array:
        """Reads a block, in the dtype that is stored.

        Raises:
            CorruptError: A chunk is absent, damaged, or has another size than it declares.
            BudgetError: One is larger than the budget, or they become more than their bytes explain.
        """
        account, out = self.source.account, np.empty(index_shape(index), self.dtype)
        places = self._places()
        for number, (position, inner, outer) in enumerate(touched_chunks(self.chunks, index)):
            is_last = tuple(cut.stop for cut in inner) == (present := self._present(position))
            if number >= _FEW and math.prod(index_shape(inner)) < TINY:
                if index_shape(inner) == present:
                    account.chunks(len(places), "Reading a data set in chunks", self.what)
                else:
                    account.step(CHUNK_STEPS, "Reading a data set in chunks", self.what)
            chunk = account.kept((self, position))
            if chunk is None:
                if position not in places:
                    raise CorruptError("A chunk is absent.", place=self.what, found=f"none at {position}")
                chunk = self._decoded(*places[position])
            out[outer] = chunk[inner]
            if is_last:
                account.free(self._size)
            else:
                account.keep((self, position), chunk, self._size)
        return out

    def _present(self, position: tuple[int, ...]) -> Shape:
        """Returns the shape of what the data set has of a chunk; one at the edge has more."""
        return tuple(min(c, n - i * c) for i, c, n in zip(position, self.chunks, self.shape, strict=True))

    def _places(self) -> dict[tuple[int, ...], tuple[Part, int]]:
        """Returns where each chunk lies, and the mask of filters that were left out."""
        account = self.source.account
        with self._listing:  # blocks that are read side by side have one list
            kept_places: dict[tuple[int, ...], tuple[Part, int]] | None = account.kept((self, "places"))
            places = self._listed() if kept_places is None else kept_places
            account.keep((self, "places"), places, 2 * NODE_BYTES * len(places))
        return places

    def _listed(self) -> dict[tuple[int, ...], tuple[Part, int]]:
        account, places = self.source.account, dict[tuple[int, ...], tuple[Part, int]]()
        for chunk in self.listed():
            account.nodes(2, "The list of a data set's chunks", self.what)
            position = tuple(at // c for at, c in zip(chunk.offset, self.chunks, strict=True))
            places[position] = (Part(self.source, chunk.address, chunk.size), chunk.mask)
        return places

    def _decoded(self, stored: Part, mask: int) -> Array:
        """Returns a chunk as an array, whose bytes are held."""
        applied = [both for bit, both in enumerate(self.filters) if not mask >> bit & 1]
        hold(stored, 0, self._size, "A chunk")
        value: Source = stored
        for i, (code, parameter) in reversed([*enumerate(applied)]):
            inside = sum(before == FLETCHER32 for before, _ in applied[:i])
            if code == FLETCHER32:
                value = _summed(value)
            elif code == DEFLATE:
                value = _inflated(value, self._size + _SUM_BYTES * inside)
            else:
                hold(stored, 0, self._size, "A chunk")
                value = _unshuffled(value, parameter)
                stored.account.free(self._size)
        if value.size != self._size:
            raise CorruptError(
                "A chunk has the wrong size.",
                place=byte_of(stored, 0),
                expected=f"{self._size} bytes",
                found=f"{value.size} bytes",
            )
        raw = np.frombuffer(value.data, np.uint8) if isinstance(value, Held) else value.read(0, self._size)
        return raw.view(self.dtype).reshape(self.chunks)


def _inflated(value: Source, size: int) -> Held:
    working = stream_bytes(value, ZLIB, size)
    hold(value, 0, working, "A chunk that is decoded")
    out = np.empty(size, np.uint8)
    filled = decompress_into(out, value, ZLIB, "A chunk")
    value.account.free(working)
    return Held(out.data[:filled], byte_of(value, 0), value.account)


def _unshuffled(value: Source, width: int) -> Held:
    """Puts back together the bytes of each element, which stand apart: all first ones, all second ones and so on."""
    width = max(1, width)
    raw = value.read(0, value.size)
    whole = raw.size - raw.size % width
    out = np.empty_like(raw)
    out[:whole].reshape(-1, width)[...] = raw[:whole].reshape(width, -1).T
    out[whole:] = raw[whole:]
    return Held(out.data, byte_of(value, 0), value.account)


def _summed(value: Source) -> Part:
    """Compares the checksum behind some bytes, and leaves it out."""
    size = value.size - _SUM_BYTES
    if size < 0:
        raise CorruptError("A chunk has no checksum.", place=byte_of(value, 0), found=f"{value.size} bytes")
    first = second = count = 0
    for start in range(0, size, PIECE):
        piece = value.read(start, min(PIECE, size - start))
        words = np.append(piece, np.zeros(piece.size % 2, np.uint8)).view(">u2").astype(np.int64)
        second += first * words.size + int(words @ np.arange(words.size, 0, -1))
        first += int(words.sum())
        count += int(np.count_nonzero(words))
    sums = [(n % _SUMMED or _SUMMED) if count else 0 for n in (second, first)]
    expected = bytes_at(value, size, _SUM_BYTES)
    little = b"".join(n.to_bytes(2, "little") for n in reversed(sums))
    swapped = b"".join(n.to_bytes(2, "big") for n in reversed(sums))  # so wrote the library before 1.6.3
    if expected not in (little, swapped):
        raise CorruptError(
            "The checksum of stored data disagrees with the data.",
            place=byte_of(value, 0),
            expected=f"Fletcher-32 {expected[::-1].hex()}",
            found=little[::-1].hex(),
            remedy="the file is damaged: fetch it again",
        )
    return Part(value, 0, size)
