"""Where the values of an HDF5 data set lie: in one run, in its header, or in chunks that an index lists.

Source: The HDF Group, HDF5 File Format Specification 3.0, IV.A.2.i "The Data Layout Message", IV.A.2.l "The Filter
Pipeline Message", VII "Appendix C: Types of Indexes for Dataset Chunks".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from statekit.converters.formats.hdf5.chunks import FILTERS_READ, StoredChunk
from statekit.converters.formats.hdf5.headers import EXTERNAL_FILES, FILTERS, LAYOUT, Header
from statekit.converters.formats.hdf5.structure import Fields, Structure, broken, is_power, unread
from statekit.converters.formats.hdf5.trees import CHUNK_NODES, old_tree, tree
from statekit.errors import RefusedError
from statekit.tensors.tensor import Shape

_COMPACT, _CONTIGUOUS, _CHUNKED, _VIRTUAL = range(4)
_SINGLE, _IMPLICIT, _FIXED, _EXTENSIBLE, _TREE = range(1, 6)
_SINGLE_FILTERED = 0x02
_PLAIN_RECORDS, _FILTERED_RECORDS = 10, 11
_NAMED_FILTERS = 256
_CHECKSUM = 4
_MOST_BITS = 64

ListChunks = Callable[[], Iterator[StoredChunk]]


@dataclass(frozen=True)
class Lying:
    """Where values lie.

    Attributes:
        start: Their first byte; None where they are in chunks, in the header, or nowhere.
        size: How many bytes lie there.
        inside: Those in the header.
        chunks: The shape of a chunk; None if there are none.
        filters: The filters that chunks went through, each with its first parameter.
        listed: Lists the chunks.
    """

    start: int | None = None
    size: int = 0
    inside: bytes | None = None
    chunks: Shape | None = None
    filters: tuple[tuple[int, int], ...] = ()
    listed: ListChunks | None = None


def where(file: Structure, header: Header, shape: Shape, item: int, place: str) -> Lying:
    """Reads where the values of a data set lie.

    Args:
        file: The file.
        header: The data set's.
        shape: Its shape.
        item: Bytes of an element.
        place: What errors call it.

    Raises:
        CorruptError: The layout is broken.
        RefusedError: The values lie in other files, or went through a filter that isn't read.
        FormatError: A layout that isn't read.
    """
    fields = header.fields(LAYOUT)
    if fields is None:
        raise broken(place, "a data set without a layout")
    version, kind = fields.number(1), fields.number(1)
    if version not in (3, 4):
        raise unread(place, f"a layout of version {version}", "version 3 or 4")
    if kind == _VIRTUAL or header.fields(EXTERNAL_FILES) is not None:
        raise RefusedError("A dataset wants its values from other files.", place=place)
    if kind == _COMPACT:
        inside = fields.take(fields.number(2))
        return Lying(size=len(inside), inside=inside)
    if kind == _CONTIGUOUS:
        start, size = fields.address(), fields.length()
        return Lying(start, 0 if start is None else size)
    if kind != _CHUNKED:
        raise broken(place, f"a layout of class {kind}")
    filters = _filters(header, place)
    read = _old_chunks if version == 3 else _new_chunks
    chunks, listed = read(file, fields, shape, item, bool(filters), place)
    return Lying(chunks=chunks, filters=filters, listed=listed)


def _filters(header: Header, place: str) -> tuple[tuple[int, int], ...]:
    fields = header.fields(FILTERS)
    if fields is None:
        return ()
    version, count = fields.number(1), fields.number(1)
    if version not in (1, 2):
        raise broken(place, f"filters of version {version}")
    fields.take(6 if version == 1 else 0)
    filters = []
    for _ in range(count):
        code = fields.number(2)
        named = version == 1 or code >= _NAMED_FILTERS
        name_bytes = fields.number(2) if named else 0
        fields.take(2)
        values = fields.number(2)
        fields.take(-(-name_bytes // 8) * 8 if version == 1 else name_bytes)
        parameters = [fields.number(4) for _ in range(values)]
        fields.take(4 if version == 1 and values % 2 else 0)
        if code not in FILTERS_READ:
            raise RefusedError(
                "A dataset went through a filter that isn't read.",
                place=place,
                expected=", ".join(FILTERS_READ.values()),
                found=f"filter {code}",
                remedy="write it again without filters",
            )
        filters.append((code, parameters[0] if parameters else 1))
    return tuple(filters)


def _old_chunks(
    file: Structure, fields: Fields, shape: Shape, item: int, filtered: bool, place: str
) -> tuple[Shape, ListChunks]:
    axes = fields.number(1)
    root = fields.address()
    chunks = tuple(fields.number(4) for _ in range(axes))
    cut = _cut(chunks, shape, item, place)
    return cut, partial(_in_old_tree, file, root, cut)


def _in_old_tree(file: Structure, root: int | None, cut: Shape) -> Iterator[StoredChunk]:
    if root is None:
        return
    for key, address in old_tree(file.apart(), root, CHUNK_NODES, 8 * len(cut) + 16):
        size, mask = key.number(4), key.number(4)
        yield StoredChunk(tuple(key.number(8) for _ in cut), address, size, mask)


def _cut(chunks: Shape, shape: Shape, item: int, place: str) -> Shape:
    """Returns the shape of a chunk; its last number is the bytes of an element."""
    if len(chunks) != len(shape) + 1 or chunks[-1] != item or 0 in chunks:
        raise broken(place, f"chunks of {chunks} in a data set of {shape}")
    return chunks[:-1]


def _new_chunks(
    file: Structure, fields: Fields, shape: Shape, item: int, filtered: bool, place: str
) -> tuple[Shape, ListChunks]:
    flags, axes, width = fields.number(1), fields.number(1), fields.number(1)
    chunks = tuple(fields.number(width) for _ in range(axes))
    cut = _cut(chunks, shape, item, place)
    index = _Index(file, shape, cut, math.prod(cut) * item, filtered, place)
    kind = fields.number(1)
    if kind == _SINGLE:
        size, mask = (fields.length(), fields.number(4)) if flags & _SINGLE_FILTERED else (index.size, 0)
        address = fields.address()
        return cut, lambda: iter(
            () if address is None else [StoredChunk((0,) * len(cut), address, size, mask)]
        )
    if kind not in _INDICES:
        raise broken(place, f"an index of kind {kind}")
    settings, read = _INDICES[kind]
    fields.take(settings)
    address = fields.address()
    return cut, lambda: read(replace(index, file=file.apart()), address) if address is not None else iter(())


@dataclass(frozen=True)
class _Index:
    """An index of chunks in the newer format.

    Attributes:
        file: The file.
        shape: The data set's shape.
        cut: A chunk's.
        size: Bytes of a chunk that went through no filter.
        filtered: Whether chunks went through filters.
        place: What errors call the data set.
    """

    file: Structure
    shape: Shape
    cut: Shape
    size: int
    filtered: bool
    place: str

    @property
    def _grid(self) -> Shape:
        return tuple(-(-n // c) for n, c in zip(self.shape, self.cut, strict=True))

    def _at(self, number: int) -> Shape:
        """Returns where the chunk of a number begins, in elements."""
        position = []
        for count, c in zip(reversed(self._grid), reversed(self.cut), strict=True):
            number, i = divmod(number, count)
            position.append(i * c)
        return tuple(reversed(position))

    def implicit(self, start: int) -> Iterator[StoredChunk]:
        """Yields chunks that lie one behind the other."""
        for number in range(math.prod(self._grid)):
            yield StoredChunk(self._at(number), start + number * self.size, self.size, 0)

    def in_tree(self, address: int) -> Iterator[StoredChunk]:
        """Yields the chunks of a tree of version 2."""
        for record in tree(self.file, address, _FILTERED_RECORDS if self.filtered else _PLAIN_RECORDS):
            at, size, mask = record.address(), self.size, 0
            if self.filtered:
                size, mask = record.number(record.left - 4 - 8 * len(self.cut)), record.number(4)
            scaled = [record.number(8) for _ in self.cut]
            if at is not None:
                yield StoredChunk(tuple(i * c for i, c in zip(scaled, self.cut, strict=True)), at, size, mask)

    def _elements(self, fields: Fields, count: int, width: int, first: int) -> Iterator[StoredChunk]:
        """Yields the chunks that so many elements of an array point to; an address of nowhere is no chunk."""
        most = math.prod(self._grid)
        for number in range(first, first + count):
            element = fields.part(width)
            at, size, mask = element.address(), self.size, 0
            if self.filtered:
                size, mask = element.number(width - self.file.widths[0] - 4), element.number(4)
            if at is not None and number < most:
                yield StoredChunk(self._at(number), at, size, mask)

    def _head(self, address: int | None, size: int, mark: bytes) -> Fields:
        head = self.file.summed(address, size, mark, "An index of chunks")
        if (head.number(1), head.number(1)) != (0, int(self.filtered)):
            raise broken(head.place, "an index of another kind")
        return head

    def _check_width(self, width: int) -> None:
        least = self.file.widths[0] + (5 if self.filtered else 0)
        if width < least or (width > least and not self.filtered):
            raise broken(self.place, f"elements of {width} bytes in an index")

    def fixed(self, address: int) -> Iterator[StoredChunk]:
        """Yields the chunks of a fixed array."""
        offset, length = self.file.widths
        head = self._head(address, 12 + offset + length, b"FAHD")
        width, page_bits, count = head.number(1), head.number(1), head.length()
        self._check_width(width)
        if count != math.prod(self._grid) or page_bits >= _MOST_BITS:
            raise broken(head.place, f"an index of {count} chunks")
        yield from self._data(head.address(), count, width, 1 << page_bits, 0, b"FADB", 0)

    def _data(
        self,
        start: int | None,
        count: int,
        width: int,
        page: int,
        first: int,
        mark: bytes,
        between: int,
        written: bytes = b"",
    ) -> Iterator[StoredChunk]:
        """Yields the chunks of a block of an array, whose elements lie in pages if it has more than one has.

        Args:
            start: Its address.
            count: How many elements it has.
            width: Bytes of an element.
            page: Elements of a page.
            first: The number of the first element.
            mark: The block's.
            between: Bytes in its head that say where in the array it is.
            written: A bit for each page, whether it is written, where the block above says so.
        """
        if start is None:
            return
        head = 6 + self.file.widths[0] + between
        if count <= page:
            block = self._head(start, head + count * width + _CHECKSUM, mark)
            block.take(head - 6)
            yield from self._elements(block, count, width, first)
            return
        pages = -(-count // page)
        bitmap = -(-pages // 8) if mark == b"FADB" else 0  # an extensible array has it in the block above
        block = self._head(start, head + bitmap + _CHECKSUM, mark)
        block.take(head - 6)
        bits = block.take(bitmap) or written.ljust(-(-pages // 8), b"\0")
        at = start + head + bitmap + _CHECKSUM
        for number in range(pages):
            here = min(page, count - number * page)
            if bits[number // 8] << number % 8 & 0x80:
                fields = self.file.summed(at, here * width + _CHECKSUM, b"", "An index of chunks")
                yield from self._elements(fields, here, width, first + number * page)
            at += here * width + _CHECKSUM

    def extensible(self, address: int) -> Iterator[StoredChunk]:
        """Yields the chunks of an extensible array."""
        offset, length = self.file.widths
        head = self._head(address, 16 + 6 * length + offset, b"EAHD")
        width, bits, inside, least, pointers, page_bits = (head.number(1) for _ in range(6))
        self._check_width(width)
        head.take(6 * length)
        if not (is_power(least) and is_power(pointers)) or max(bits, page_bits) >= _MOST_BITS:
            raise broken(head.place, f"an index of {bits} bits")
        direct = 2 * (pointers - 1)
        supers = max(0, 1 + bits - (least.bit_length() - 1) - 2 * (pointers.bit_length() - 1))
        size = 6 + offset + inside * width + (direct + supers) * offset + _CHECKSUM
        root = head.address()
        if root is None:
            return
        block = self._head(root, size, b"EAIB")
        block.take(offset)
        yield from self._elements(block, inside, width, 0)
        first, at_bytes, page = inside, -(-bits // 8), 1 << page_bits
        levels = [(level, 1 << level // 2, least << (level + 1) // 2) for level in range(_MOST_BITS)]
        for count in islice((count for _, blocks, count in levels for _ in range(blocks)), direct):
            yield from self._data(block.address(), count, width, page, first, b"EADB", at_bytes)
            first += count
        start = 2 * (pointers.bit_length() - 1)
        for _, blocks, count in levels[start : start + supers]:
            child = block.address()
            if child is not None:
                yield from self._super(child, blocks, count, width, page, first, at_bytes)
            first += blocks * count

    def _super(
        self, start: int, blocks: int, count: int, width: int, page: int, first: int, at_bytes: int
    ) -> Iterator[StoredChunk]:
        """Yields the chunks of a block of blocks."""
        offset = self.file.widths[0]
        pages = -(-count // page) if count > page else 0
        bitmap = -(-pages // 8)
        size = 6 + offset + at_bytes + blocks * (bitmap + offset) + _CHECKSUM
        block = self._head(start, size, b"EASB")
        block.take(offset + at_bytes)
        written = [block.take(bitmap) for _ in range(blocks)]
        for number, bits in enumerate(written):
            before = first + number * count
            yield from self._data(block.address(), count, width, page, before, b"EADB", at_bytes, bits)


_INDICES = {
    _IMPLICIT: (0, _Index.implicit),
    _FIXED: (1, _Index.fixed),
    _EXTENSIBLE: (5, _Index.extensible),
    _TREE: (6, _Index.in_tree),
}
"""Kind of an index -> bytes of its settings, and what lists its chunks."""
