"""Heaps of HDF5: where names, texts and messages lie that their owners point to.

A local heap has the names of one group; a global heap has texts of variable length; a fractal heap has links or
attributes of a group that has many.
Source: The HDF Group, HDF5 File Format Specification 3.0, III.D "Local Heaps", III.E "Global Heap", III.G "Fractal
Heap".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from statekit.converters.formats.hdf5.structure import Fields, Structure, broken, is_power, unread
from statekit.converters.formats.hdf5.trees import tree

_CHECKSUM = 4
_MANAGED, _HUGE, _TINY = 0, 1, 2
_HUGE_RECORDS = 1
_SUMMED_BLOCKS = 0x02
_SMALL_TINY = 16
_NOTHING_FREE = 1


def local_heap(file: Structure, address: int | None) -> tuple[Fields, int]:
    """Returns the names of a group, of which each ends with a zero, and where the first free block among them is.

    Raises:
        CorruptError: The heap is broken.
    """
    offset, length = file.widths
    head = file.block(address, 8 + 2 * length + offset, b"HEAP", "A heap")
    if head.number(1):
        raise broken(head.place, "a heap of another version")
    head.take(3)
    size, free = head.length(), head.length()
    return file.block(head.address(), size, b"", "A heap"), size if free == _NOTHING_FREE else free


def global_heap(file: Structure, address: int) -> dict[int, bytes]:
    """Returns the objects of a global heap by their numbers.

    Raises:
        CorruptError: The heap is broken.
    """
    head = file.widths[1] + 8
    start = file.peek(address, head)
    start.take(8)
    heap = file.block(address, start.length(), b"GCOL", "A heap")
    if heap.number(1) != 1:
        raise broken(heap.place, "a heap of another version")
    heap.take(head - 5)
    objects: dict[int, bytes] = {}
    while heap.left >= head:
        number = heap.number(2)
        heap.take(6)
        size = heap.length()
        if not number:  # what is left is free, and its size counts its head
            if not head <= size <= heap.left + head:
                raise broken(heap.place, f"{size} free bytes where {heap.left + head} are left")
            break
        file.source.account.hold(size, "A heap", heap.place)
        objects[number] = heap.take(size)
        heap.take(min(-size % 8, heap.left))
    return objects


@dataclass
class FractalHeap:
    """A fractal heap.

    Attributes:
        file: The file.
        head: Its header, behind its mark.
        blocks: What its blocks hold, by their first address in the heap.
    """

    file: Structure
    head: Fields
    blocks: dict[int, bytes] = field(default_factory=dict)
    huge: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def at(cls, file: Structure, address: int | None) -> FractalHeap:
        """Reads the heap at an address.

        Raises:
            CorruptError: It is broken.
            FormatError: Its blocks went through filters.
        """
        offset, length = file.widths
        heap = cls(file, file.summed(address, 26 + 12 * length + 3 * offset, b"FRHP", "A heap"))
        heap._read()
        return heap

    def _read(self) -> None:
        head, file = self.head, self.file
        version, self._id_bytes, filtered = head.number(1), head.number(2), head.number(2)
        if version or filtered:
            raise unread(head.place, f"a heap of version {version} with {filtered} bytes of filters", "none")
        self._is_summed = bool(head.number(1) & _SUMMED_BLOCKS)
        most_managed = head.number(4)
        head.length()
        huge = head.address()
        head.length()
        head.address()
        for _ in range(8):
            head.length()
        self._width, self._first, self._most = head.number(2), head.length(), head.length()
        self._bits = head.number(2)
        head.number(2)
        root, rows = head.address(), head.number(2)
        if not (self._width and is_power(self._first) and is_power(self._most) and self._bits <= 64):
            raise broken(head.place, "a heap of no usable sizes")
        self._offset_bytes = -(-self._bits // 8)
        most_offset = -(-(self._most.bit_length() - 1) // 8)
        self._length_bytes = min(most_offset, max(1, -(-most_managed.bit_length() // 8)))
        if root is not None:
            self._indirect(root, 0, rows) if rows else self._direct(root, 0, self._first)
        for record in tree(file, huge, _HUGE_RECORDS) if huge is not None else ():
            address, size, number = record.address(), record.length(), record.length()
            self.huge[number] = file.block(address, size, b"", "An attribute").data

    def _row_bytes(self, row: int) -> int:
        return self._first << max(0, row - 1)

    def _direct(self, address: int, at: int, size: int) -> None:
        read = self.file.block(address, size, b"FHDB", "A heap")
        self._check(read, at)
        if self._is_summed:
            self._compare(read)
        self.file.source.account.hold(len(read.data), "A heap", read.place)
        self.blocks[at] = read.data

    def _compare(self, block: Fields) -> None:
        """Compares a block's checksum, which counts its own four bytes as zeros."""
        start = block.at
        stated = block.number(_CHECKSUM)
        data = block.data[:start] + bytes(_CHECKSUM) + block.data[start + _CHECKSUM :]
        self.file.compare(data, stated, block.place)

    def _indirect(self, address: int, at: int, rows: int) -> None:
        """Reads the blocks of a table of blocks, and of the tables in it."""
        offset = self.file.widths[0]
        if rows > 2 * self._bits:
            raise broken(self.head.place, f"a table of {rows} rows")
        size = 5 + offset + self._offset_bytes + rows * self._width * offset + _CHECKSUM
        table = self.file.summed(address, size, b"FHIB", "A heap")
        self._check(table, at)
        for row in range(rows):
            wide = self._row_bytes(row)
            for _ in range(self._width):
                child = table.address()
                if child is not None and wide <= self._most:
                    self._direct(child, at, wide)
                elif child is not None:
                    self._indirect(child, at, (wide // (self._first * self._width)).bit_length())
                at += wide

    def _check(self, block: Fields, at: int) -> None:
        version, _ = block.number(1), block.address()
        if version or block.number(self._offset_bytes) != at:
            raise broken(block.place, "a block of another place in the heap")

    def get(self, identity: Fields) -> Fields:
        """Returns an object of the heap by its identity.

        Raises:
            CorruptError: The heap has none.
        """
        first = identity.number(1)
        kind = first >> 4 & 3
        if first >> 6 or kind > _TINY:
            raise broken(identity.place, f"an object of kind {kind}")
        if kind == _TINY:
            long = self._id_bytes - 1 > _SMALL_TINY
            size = (first & 15) << 8 | identity.number(1) if long else first & 15
            data = identity.take(size + 1)
        elif kind == _HUGE:
            data = self._huge(identity)
        else:
            at, size = identity.number(self._offset_bytes), identity.number(self._length_bytes)
            data = self._managed(at, size)
        return Fields(data, identity.place, self.file.widths)

    def _huge(self, identity: Fields) -> bytes:
        offset, length = self.file.widths
        if self._id_bytes > offset + length:
            return self.file.block(identity.address(), identity.length(), b"", "An attribute").data
        number = identity.number(min(length, self._id_bytes - 1))
        if number not in self.huge:
            raise broken(identity.place, f"object {number}, which its heap hasn't")
        return self.huge[number]

    def _managed(self, at: int, size: int) -> bytes:
        start = max((start for start in self.blocks if start <= at), default=None)
        if start is None or at + size > start + len(self.blocks[start]):
            raise broken(self.head.place, f"{size} bytes at {at}, which the heap hasn't")
        return self.blocks[start][at - start : at - start + size]


def objects(file: Structure, heap: int | None, index: int | None, kind: int, before: int) -> Iterator[Fields]:
    """Yields the objects of a fractal heap that the records of a tree point to.

    Args:
        file: The file.
        heap: The heap; None if there is none.
        index: The tree's header.
        kind: Number of the records' type.
        before: Bytes in a record before an object's identity.
    """
    if heap is None:
        return
    stored = FractalHeap.at(file, heap)
    for record in tree(file, index, kind):
        record.take(before)
        yield stored.get(record)
