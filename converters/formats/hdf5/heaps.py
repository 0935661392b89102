"""Watches the global heaps that the HDF5 library reads: one whose free space is smaller than its own header has no end.

A text of variable length, as Keras' attributes are, lies in a global heap, a row of objects each behind its number and
size. Number 0 is free space, whose size counts its header. The library goes on by that size, so that 0 keeps it there
for good, in C, where no exception reaches it. What it reads passes through here first.
Source: The HDF Group, HDF5 File Format Specification 3.0, III.E "Disk Format: Level 1E - Global Heap".
"""

from __future__ import annotations

import io
import os
import struct
from typing import IO, Any

MARK = b"GCOL\x01\0\0\0"
"""What a heap of version 1 begins with."""
_OBJECT = struct.Struct("<HHxxxxQ")
_SIZE = struct.Struct("<Q")
_ALIGNED = 8
MAX_HEAP = 64 * 2**20
"""The largest heap that is walked over, in bytes."""


class Watched(io.RawIOBase):
    """A file that can be read, whose heaps are looked at before whoever reads them sees them.

    Attributes:
        watching: Whether they are: while headers are read, and not values, which may hold any bytes.
    """

    def __init__(self, file: IO[bytes] | io.RawIOBase) -> None:
        self._file, self.watching = file, True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any, /) -> int:
        start = self._file.tell()
        data = self._file.read(len(memoryview(buffer).cast("B"))) or b""
        memoryview(buffer).cast("B")[: len(data)] = data
        if self.watching:
            at = data.find(MARK)
            while at >= 0:
                self._check(start + at)
                at = data.find(MARK, at + 1)
        self._file.seek(start + len(data))
        return len(data)

    def _check(self, address: int) -> None:
        """Raises OSError if walking over the heap at an address doesn't lead to its end."""
        self._file.seek(address + len(MARK))
        raw = self._file.read(_SIZE.size) or b""
        size = _SIZE.unpack(raw)[0] if len(raw) == _SIZE.size else 0
        if size > MAX_HEAP:
            raise OSError(f"the heap at byte {address} says that it has {size} bytes")
        heap = self._file.read(max(0, size - len(MARK) - _SIZE.size)) or b""
        at = 0
        while at + _OBJECT.size <= len(heap):
            number, _, length = _OBJECT.unpack_from(heap, at)
            step = _OBJECT.size + -(-length // _ALIGNED) * _ALIGNED if number else length
            if step < _OBJECT.size or step > len(heap) - at:
                raise OSError(
                    f"object {number} in the heap at byte {address} says that it has {length} bytes"
                )
            at += step
