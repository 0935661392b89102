"""Shards of zarr format 3: many chunks in one value, with an index of where each lies.

The index has two uint64 for each chunk of the shard, in C order: offset and size; both 2^64-1 for a chunk that is
absent. Then follows its crc32c.
Source: zarr-specs, codec `sharding_indexed` version 1.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from statekit.converters.formats.crc32c import crc32c
from statekit.converters.formats.zarr.stores import Value, part
from statekit.errors import CorruptError, RefusedError
from statekit.tensors.tensor import Array, Shape

_ABSENT = 2**64 - 1
_MAX_INDEX = 2**26
"""The largest index that is read, in bytes."""


@dataclass(frozen=True)
class Shards:
    """How chunks lie in shards.

    Attributes:
        shape: The shape of a shard in elements; a multiple of the chunks' shape.
        at_end: Whether the index lies at the end of the shard, and not at its start.
        checked: Whether the index has a checksum.
    """

    shape: Shape
    at_end: bool = True
    checked: bool = True

    def grid(self, chunks: Shape) -> Shape:
        """Returns how many chunks of a shape a shard has along each axis."""
        return tuple(n // c for n, c in zip(self.shape, chunks, strict=True))

    def index_bytes(self, chunks: Shape) -> int:
        """Returns the size of a shard's index."""
        return 16 * math.prod(self.grid(chunks)) + (4 if self.checked else 0)

    def read_index(self, shard: Value, chunks: Shape) -> Array:
        """Reads the index of a shard: offset and size for every chunk, of shape (*grid, 2).

        Raises:
            RefusedError: It declares to be larger than any index.
            CorruptError: The shard is too small for it, its checksum disagrees, or a chunk lies outside the shard.
        """
        size = self.index_bytes(chunks)
        if size > _MAX_INDEX:
            raise RefusedError(
                "A shard declares an absurd number of chunks.",
                place=shard.place,
                found=f"index of {size} bytes",
            )
        if shard.size < size:
            raise CorruptError(
                "A shard is smaller than its index.",
                place=shard.place,
                expected=f"at least {size} bytes",
                found=f"{shard.size} bytes",
            )
        data = shard.read_at(shard.size - size if self.at_end else 0, size)
        if self.checked and crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise CorruptError("The checksum of a shard's index disagrees.", place=shard.place)
        index = np.frombuffer(data, "<u8", count=2 * (size // 16)).reshape(-1, 2)
        present = index[(index != _ABSENT).any(axis=1)]
        if present.size and bool(
            np.any((present[:, 1] > shard.size) | (present[:, 0] > shard.size - present[:, 1]))
        ):
            raise CorruptError(
                "A chunk lies outside its shard.", place=shard.place, expected=f"within {shard.size} bytes"
            )
        return index.reshape(*self.grid(chunks), 2)

    def chunk(self, shard: Value, index: Array, position: tuple[int, ...]) -> Value | None:
        """Returns the stored bytes of the chunk at a position within its shard, or None if it is absent."""
        offset, size = (int(n) for n in index[position])
        return None if offset == size == _ABSENT else part(shard, offset, size)
