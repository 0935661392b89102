"""The order in which a group of an HDF5 file got its members, as its local heap shows it.

The library lists members by name. Where they are described doesn't tell their order either: what a group that grew
left free, a later and smaller member takes. But names are put into the group's heap one behind the other.

Source: The HDF Group, HDF5 File Format Specification 3.0, III.D "Local Heaps", IV.A.1.a "Version 1 Data Object Header
Prefix", IV.A.2.r "The Symbol Table Message".
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeAlias

Read: TypeAlias = Callable[[int, int], bytes]
"""Gives so many bytes from an address on; fewer at the end of the file."""

MAX_BLOCK = 64 * 2**20
"""The longest header or list of names that is looked at, in bytes."""
_SYMBOL_TABLE, _CONTINUATION = 0x11, 0x10
_PREFIX, _MESSAGE, _HEAP = struct.Struct("<BxHIIxxxx"), struct.Struct("<HHxxxx"), struct.Struct("<4sB3xQQQ")
_TWO = struct.Struct("<QQ")
_ALIGNED = 8


class Names:
    """Reads groups' names, of a file whose addresses have 8 bytes; no more bytes of it than there are."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self._left = read, size

    def of(self, address: int) -> dict[str, int]:
        """Returns where each name of a group stands among them; none if the group has no local heap.

        Args:
            address: Where the group is described.
        """
        try:
            heap = self._heap(address)
            if heap is None:
                return {}
            mark, version, size, free, start = _HEAP.unpack(self._bytes(heap, _HEAP.size))
            return _names(self._bytes(start, size), free) if (mark, version) == (b"HEAP", 0) else {}
        except (struct.error, OSError, OverflowError, ValueError):
            return {}

    def _bytes(self, address: int, length: int) -> bytes:
        self._left -= length
        if self._left < 0 or length > MAX_BLOCK:
            raise ValueError("headers lie over each other, or are too long")
        return self._read(address, length)

    def _heap(self, address: int) -> int | None:
        """Returns the address of a group's heap."""
        version, _, _, size = _PREFIX.unpack(self._bytes(address, _PREFIX.size))
        blocks = [(address + _PREFIX.size, size)] if version == 1 else []
        for at, length in blocks:  # grows while headers go on elsewhere
            block, here = self._bytes(at, length), 0
            while here + _MESSAGE.size <= len(block):
                kind, size = _MESSAGE.unpack_from(block, here)
                here += _MESSAGE.size
                if kind == _SYMBOL_TABLE:
                    return int(_TWO.unpack_from(block, here)[1])
                if kind == _CONTINUATION:
                    blocks.append(_TWO.unpack_from(block, here))
                here += size
        return None


def _names(heap: bytes, free: int) -> dict[str, int]:
    """Returns where in a heap each name begins, given where its free space does."""
    found: dict[str, int] = {}
    here = 0
    while here < len(heap) and here != free:
        end = heap.find(b"\0", here)
        if end < 0:
            break
        found[heap[here:end].decode("utf-8", "replace")] = here
        here = end + _ALIGNED - end % _ALIGNED
    return found
