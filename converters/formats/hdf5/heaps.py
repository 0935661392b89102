"""Watches the global heaps that the HDF5 library reads: one whose free space is smaller than its own header has no end.

A text of variable length, as Keras' attributes are, lies in a global heap, a row of objects each behind its number and
size. Number 0 is free space, whose size counts its header. The library goes on by that size, so that 0 keeps it there
for good, in C, where no exception reaches it. What it reads passes through here first.
Several texts may be one object, which the library gives out as often: they are held as if each were the longest.
Source: The HDF Group, HDF5 File Format Specification 3.0, III.E "Disk Format: Level 1E - Global Heap".
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from statekit.budget import Account

MARK = b"GCOL\x01\0\0\0"
"""What a heap of version 1 begins with."""
_OBJECT = struct.Struct("<HHxxxxQ")
_SIZE = struct.Struct("<Q")
_ALIGNED = 8
_WHAT = "A heap of an HDF5 file"


class Watched(io.RawIOBase):
    """A file that can be read, whose heaps are looked at before whoever reads them sees them.

    Attributes:
        watching: Whether they are: while headers are read, and not values, which may hold any bytes.

    Args:
        file: The file.
        account: What it draws on; the library keeps heaps that it has read.
        place: The file's name in errors.
    """

    def __init__(self, file: IO[bytes] | io.RawIOBase, account: Account, place: str) -> None:
        self._file, self.watching = file, True
        self._account, self._place = account, place
        self._heaps: set[int] = set()
        self._longest = self._texts = 0

    @contextmanager
    def giving(self, texts: int) -> Iterator[None]:
        """Holds, while an attribute is read, what so many texts of it take at most."""
        with self._account.passing() as passing:
            self._texts, self._passing = texts, passing
            passing.hold(texts * self._longest, "An attribute", self._place)
            try:
                yield
            finally:
                self._texts = 0

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
        """Raises OSError if walking over the heap at an address doesn't lead to its end; notes its longest object."""
        self._file.seek(address + len(MARK))
        raw = self._file.read(_SIZE.size) or b""
        size = _SIZE.unpack(raw)[0] if len(raw) == _SIZE.size else 0
        place = f"byte {address} of {self._place}"
        if address not in self._heaps:
            self._account.hold(size, _WHAT, place)
            self._heaps.add(address)
        self._account.step(size // _OBJECT.size, _WHAT, place)
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
            if number and length > self._longest:
                if self._texts:
                    self._passing.hold(self._texts * (length - self._longest), "An attribute", place)
                self._longest = length
