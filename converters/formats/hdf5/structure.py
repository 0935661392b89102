"""The bytes of an HDF5 file's structure: what is read once, in pieces that lie apart, within the file.

Everything in an HDF5 file is found by its address: headers, heaps, trees and tables. A file that isn't what it seems
points a node at itself or at another's middle. Here each piece may be read once, and all together aren't more than the
file, so that a walk over any file ends.

    file = Structure(source, place)
    fields = file.block(address, 24, b"TREE", "A tree")
    kind, level, count = fields.number(1), fields.number(1), fields.number(2)

Source: The HDF Group, HDF5 File Format Specification 3.0, II.A "Superblock"; checksums: Bob Jenkins, lookup3.c,
`hashlittle`, as the library's H5checksum.c has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from itertools import islice

from statekit.errors import CorruptError, FormatError
from statekit.files.source import Source, bring, bring_scattered, byte_of, bytes_at, is_stored, require

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_WORD = 0xFFFFFFFF
_HASH_START, _HASH_BYTES = 0xDEADBEEF, 12
_HASH_STEPS = 4
"""Bytes of a checksum that take a step of work."""
_MOST = 2**26
"""Bytes of the largest piece of structure that is read: an attribute, or a block of a heap."""
_PAGE, _PAGES = 2**16, 16
AT_ONCE = 512
"""Addresses whose pages are brought from a store at once."""
_NOWHERE = {width: (1 << 8 * width) - 1 for width in (2, 4, 8)}
"""The address of nothing, by its bytes."""


class Fields:
    """The fields of a piece of structure, one after the other; all numbers are little-endian.

    Args:
        data: The piece.
        place: What errors call it.
        widths: Bytes of an address, and of a length.
    """

    def __init__(self, data: bytes, place: str, widths: tuple[int, int] = (8, 8)) -> None:
        self.data, self.place, self.at = data, place, 0
        self._widths = widths

    def take(self, count: int) -> bytes:
        """Returns the next bytes.

        Raises:
            CorruptError: There are fewer.
        """
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise broken(self.place, f"a field of {count} bytes where {len(self.data) - self.at} are left")
        value, self.at = self.data[self.at : end], end
        return value

    def number(self, count: int) -> int:
        """Returns an unsigned number of so many bytes."""
        end = self.at + count
        if end > len(self.data):
            raise broken(self.place, f"a number of {count} bytes where {self.left} are left")
        value, self.at = int.from_bytes(self.data[self.at : end], "little"), end
        return value

    def address(self) -> int | None:
        """Returns an address; None where nothing is."""
        width = self._widths[0]
        value = self.number(width)
        return None if value == _NOWHERE[width] else value

    def length(self) -> int:
        """Returns a length."""
        return self.number(self._widths[1])

    def part(self, count: int) -> Fields:
        """Returns the fields of the next bytes."""
        return Fields(self.take(count), self.place, self._widths)

    def text(self) -> bytes:
        """Returns the bytes before the next zero, and passes over both."""
        end = self.data.find(b"\0", self.at)
        if end < 0:
            raise broken(self.place, "a name without an end")
        value, self.at = self.data[self.at : end], end + 1
        return value

    def align(self, start: int) -> None:
        """Passes over what fills a field that began at `start` up to a multiple of 8 bytes."""
        self.take(-(self.at - start) % 8)

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return len(self.data) - self.at


class Structure:
    """An HDF5 file's structure.

    Raises:
        CorruptError: The superblock is broken, or the file is shorter than it says.
        FormatError: Addresses of a kind that isn't read.
    """

    def __init__(self, source: Source, place: str) -> None:
        self.source, self.place = source, place
        self.widths = (8, 8)
        self._starts: set[int] = set()
        self._left = source.size
        self._pages: dict[int, bytes] = {}
        bring_scattered(source)
        self.root = self._superblock()

    def _superblock(self) -> int:
        """Returns the address of the root group's header."""
        head = self._fields(0, min(96, self.source.size))
        if head.take(len(SIGNATURE)) != SIGNATURE:
            raise broken(head.place, "another signature")
        version = head.number(1)
        if version > 3:
            raise unread(head.place, f"superblock {version}", "superblocks of version 0 to 3")
        if version < 2:
            head.take(4)
        self.widths = head.number(1), head.number(1)
        if not {*self.widths} <= _NOWHERE.keys():
            raise broken(head.place, f"addresses of {self.widths[0]}, lengths of {self.widths[1]} bytes")
        head.take({0: 9, 1: 13}.get(version, 1))
        head = self._resized(head)
        base = head.address()
        head.address()  # of free space, or of the superblock's extension: neither has a part in what is read
        end = head.address()
        if base != 0 or end is None:
            raise unread(head.place, f"addresses from byte {base} on", "addresses from the first byte on")
        if end > self.source.size:
            raise broken(head.place, f"{self.source.size} bytes of {end}")
        if version < 2:
            head.address()  # of a driver, which no single file has
            head.address()  # the root's name, which is empty
        root = head.address()
        if version >= 2:
            self.compare(head.data[: head.at], head.number(4), head.place)
        if root is None:
            raise broken(head.place, "no root group")
        return root

    def _resized(self, fields: Fields) -> Fields:
        resized = Fields(fields.data, fields.place, self.widths)
        resized.at = fields.at
        return resized

    def block(self, address: int | None, size: int, mark: bytes, what: str) -> Fields:
        """Returns a piece of structure behind its mark, without a checksum at its end.

        Args:
            address: Its first byte.
            size: How many bytes it has.
            mark: What it begins with; b"" if nothing tells.
            what: What it is, as an error begins.

        Raises:
            CorruptError: It doesn't lie in the file, was read already, or is something else.
        """
        if address is None:
            raise broken(self.place, f"{what.lower()} that is nowhere")
        if address in self._starts or size > self._left:
            raise broken(byte_of(self.source, address), f"{what.lower()} that lies in another")
        self._starts.add(address)
        self._left -= size
        fields = self._fields(address, size)
        if fields.take(len(mark)) != mark:
            raise broken(fields.place, f"no mark of {what.lower()}")
        return fields

    def summed(self, address: int | None, size: int, mark: bytes, what: str) -> Fields:
        """Returns a piece of structure as `block` does, whose checksum in its last four bytes fits."""
        fields = self.block(address, size, mark, what)
        if size < len(mark) + 4:
            raise broken(fields.place, f"{what.lower()} of {size} bytes")
        self.compare(fields.data[:-4], int.from_bytes(fields.data[-4:], "little"), fields.place)
        rest = Fields(fields.data[:-4], fields.place, self.widths)
        rest.at = fields.at
        return rest

    def apart(self) -> Structure:
        """Returns the same file for a walk of its own, as over the chunks of one data set."""
        walk = copy(self)
        walk._starts, walk._left, walk._pages = set(), self.source.size, {}
        return walk

    def peek(self, address: int | None, size: int) -> Fields:
        """Returns bytes that tell how large a piece is, which is read by `block` then."""
        if address is None:
            raise broken(self.place, "an address that is nowhere")
        return self._fields(address, size)

    def bring(self, addresses: Iterable[int | None]) -> None:
        """Has the pages of addresses brought from a store at once, of the first `AT_ONCE`: they aren't proven yet."""
        if is_stored(self.source):
            pages = {address // _PAGE for address in islice(addresses, AT_ONCE) if address is not None}
            bring(self.source, ((page * _PAGE, _PAGE) for page in pages))

    def compare(self, data: bytes, stated: int, place: str) -> None:
        """Compares a checksum.

        Raises:
            CorruptError: It disagrees.
        """
        self.source.account.step(len(data) // _HASH_STEPS, "An HDF5 file", place)
        if (sum_ := lookup3(data)) != stated:
            raise CorruptError(
                "The checksum of an HDF5 file's structure disagrees with it.",
                place=place,
                expected=f"{stated:08x}",
                found=f"{sum_:08x}",
                remedy="the file is damaged: fetch it again",
            )

    def _fields(self, address: int, size: int) -> Fields:
        place = byte_of(self.source, address)
        require(self.source, address, size)
        if size > _MOST:
            raise broken(place, f"{size} bytes of structure in one piece")
        if size <= _PAGE:
            return Fields(self._read(address, size), place, self.widths)
        with self.source.account.passing() as passing:
            passing.hold(size, "A header", place)
            return Fields(bytes_at(self.source, address, size), place, self.widths)

    def _read(self, address: int, size: int) -> bytes:
        """Reads a few bytes, of pages that are kept for what lies beside them."""
        number, start = divmod(address, _PAGE)
        if start + size > _PAGE:
            return bytes_at(self.source, address, size)
        page = self._pages.pop(number, None)
        if page is None:
            page = bytes_at(self.source, number * _PAGE, min(_PAGE, self.source.size - number * _PAGE))
            if len(self._pages) >= _PAGES:
                del self._pages[next(iter(self._pages))]
        self._pages[number] = page
        return page[start : start + size]


def broken(place: str, found: str) -> CorruptError:
    """Makes the error for structure that breaks the format."""
    return CorruptError(
        "An HDF5 file can't be read.", place=place, found=found, remedy="copy the file again, whole"
    )


def unread(place: str, found: str, expected: str) -> FormatError:
    """Makes the error for something of the format that statekit doesn't read."""
    return FormatError(
        "An HDF5 file has something that statekit doesn't read.",
        place=place,
        expected=expected,
        found=found,
        remedy="write it again with h5py's usual settings",
    )


def lookup3(data: bytes) -> int:
    """Returns the checksum of structure.

    Example:
        >>> f"{lookup3(b'Four score and seven years ago'):08x}"
        '17770551'
    """
    a = b = c = (_HASH_START + len(data)) & _WORD
    whole = max(0, (len(data) - 1) // _HASH_BYTES) * _HASH_BYTES
    for start in range(0, whole, _HASH_BYTES):
        a = (a + int.from_bytes(data[start : start + 4], "little")) & _WORD
        b = (b + int.from_bytes(data[start + 4 : start + 8], "little")) & _WORD
        c = (c + int.from_bytes(data[start + 8 : start + 12], "little")) & _WORD
        a = (a - c) & _WORD ^ _turned(c, 4)
        c = (c + b) & _WORD
        b = (b - a) & _WORD ^ _turned(a, 6)
        a = (a + c) & _WORD
        c = (c - b) & _WORD ^ _turned(b, 8)
        b = (b + a) & _WORD
        a = (a - c) & _WORD ^ _turned(c, 16)
        c = (c + b) & _WORD
        b = (b - a) & _WORD ^ _turned(a, 19)
        a = (a + c) & _WORD
        c = (c - b) & _WORD ^ _turned(b, 4)
        b = (b + a) & _WORD
    tail = data[whole:]
    if not tail:
        return c
    a = (a + int.from_bytes(tail[:4], "little")) & _WORD
    b = (b + int.from_bytes(tail[4:8], "little")) & _WORD
    c = (c + int.from_bytes(tail[8:], "little")) & _WORD
    for turn in ((14, 11, 25), (16, 4, 14)):
        c = ((c ^ b) - _turned(b, turn[0])) & _WORD
        a = ((a ^ c) - _turned(c, turn[1])) & _WORD
        b = ((b ^ a) - _turned(a, turn[2])) & _WORD
    return ((c ^ b) - _turned(b, 24)) & _WORD


def _turned(word: int, bits: int) -> int:
    return (word << bits | word >> 32 - bits) & _WORD


def is_power(number: int) -> bool:
    """Tells whether a number is a power of two."""
    return number > 0 and not number & number - 1
