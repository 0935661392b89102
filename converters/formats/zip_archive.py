"""The zip archives of `torch.save`, MXNet and Keras: members read in place, their CRC-32 enforced.

PyTorch's own reader skips the checksums, reads the first of two members with one name where other programs read the
last, and inflates what it is given. Here all that is refused: an archive has one reading or none. Members of Keras may
be deflated; such a one is read as a whole. Writing goes forward only, so that nothing is held but a block.
Source: APPNOTE.TXT (the zip format) and caffe2/serialize/inline_container.cc (what PyTorch writes).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import BinaryIO, NamedTuple

from statekit.converters.formats.crc import crc32
from statekit.converters.formats.storage import DEFLATE, MOST_OF_ONE, decompressed
from statekit.errors import CommitError, CorruptError, FormatError, RefusedError
from statekit.files.manifest import Checked
from statekit.files.source import Counts, Part, Source, bring, bytes_at, hold, is_stored, record, short
from statekit.pipeline import RunningChecks
from statekit.tensors.tensor import BLOCK_BYTES, Array

LOCAL = struct.Struct("<IHHHHHIIIHH")
CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
END = struct.Struct("<IHHHHIIH")
END64 = struct.Struct("<IQHHIIQQQQ")
LOCATOR = struct.Struct("<IIQI")
LOCAL_MAGIC, CENTRAL_MAGIC, END_MAGIC, END64_MAGIC, LOCATOR_MAGIC = (
    0x04034B50, 0x02014B50, 0x06054B50, 0x06064B50, 0x07064B50,
)  # fmt: skip
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF
_DEFLATED = 8
_NODES = 3
"""Values of a tree that a member counts for, with its entry in the directory."""
WIDE_FROM = FULL32
"""Sizes and offsets from here on are written in 64 bits."""
GATHERED, _ALONE = 2**20, 2**16
"""Bytes that are gathered before they are written, and of which so many are written by themselves."""
_NEAR = 4096
"""Bytes from one header to the next, up to which both are read at once: a disk gives no less."""
_AT_ONCE = 2**18
"""Bytes that are read at once to look at headers."""
_SMALL, _EXTRA = 4096, 128
"""Bytes of a member that is brought with others, and of what its header may have beside its name."""
_HELD = 2**26
"""Bytes of a directory or a pickle that is brought from a store with its small neighbours."""
_DESCRIPTOR_MAGIC = 0x08074B50
_UTF8, _DESCRIPTOR = 0x0800, 0x0008


@dataclass
class Member:
    """One file in an archive.

    Attributes:
        name: Its name.
        size: How many bytes it has.
        crc: Their CRC-32; 0 if it wasn't computed.
        packed: How many bytes it is deflated to; None if it is stored as it is.
        locate: Finds where its bytes lie, by its header.
    """

    name: str
    size: int
    crc: int
    packed: int | None
    locate: Callable[[], int] = field(repr=False)

    @cached_property
    def start(self) -> int:
        """Where its bytes lie.

        Raises:
            CorruptError: Its header contradicts the directory, or it overlaps the next member.
        """
        return self.locate()


class _Entry(NamedTuple):
    name: bytes
    header: int
    size: int
    crc: int
    packed: int | None

    @property
    def stored(self) -> int:
        """Bytes that it takes in the archive."""
        return self.size if self.packed is None else self.packed


class Archive:
    """An archive opened for reading. Only its directory and headers have been read; of one in a store, the directory.

    Raises:
        RefusedError: It has two readings, or members that aren't stored in a way that is allowed.
        CorruptError: Its directory, or what it says, disagrees with its bytes.
        BudgetError: Its directory is more than the job may hold.
    """

    def __init__(self, source: Source, deflated: bool = False) -> None:
        self.source = source
        entries, self._directory = _directory(source, deflated)
        self.members = _members(source, entries, self._directory)
        self._checks = RunningChecks(crc32)
        self._small = Counts(source, _small_runs(entries))

    def read(self, name: str, start: int, count: int) -> Array:
        """Reads bytes of a member that is stored: (count,) uint8. Its checksum is compared the first time.

        That is before any byte is given out, or in a passage (statekit/pipeline.py) at its end.

        Raises:
            CorruptError: The checksum disagrees, or the bytes lie outside the member.
        """
        member = self.members[name]
        if start < 0 or count < 0 or start + count > member.size:
            raise short(self.source, member.start + start, count)
        if member.size <= _SMALL:
            self._small.bring()
        piece = self.source.read(member.start + start, count)
        if member.crc:
            self._checks.take(name, start, piece.data, member.size, partial(self.check, name))
        return piece

    def record(self, name: str, what: str) -> bytes:
        """Reads a member that is held, as `source.record` reads it; its checksum is compared.

        Raises:
            CorruptError: The checksum disagrees.
            BudgetError: It is more than the job may hold.
        """
        member = self.members[name]
        stored = member.size if member.packed is None else member.packed
        if _SMALL < stored <= _HELD:
            bring(self.source, [(member.start, stored + _SMALL)])  # with PyTorch's first members behind it
        if member.packed is None:
            data = record(self.source, member.start, member.size, None, what)
        else:
            data = self._inflated(member, member.packed, what)
        if member.crc:
            self._compare(member, crc32(data))
        self._checks.add(name)
        return data

    def check(self, name: str) -> None:
        """Compares the checksum of a member that is stored, once, if it was computed.

        Raises:
            CorruptError: It disagrees.
        """
        member = self.members[name]
        if name not in self._checks and member.crc:
            self._compare(member, self._crc(member))
        self._checks.add(name)

    def _inflated(self, member: Member, packed: int, what: str) -> bytes:
        hold(self.source, member.start, member.size, what)
        whole = io.BytesIO()  # which gives its bytes away without a copy
        for piece in decompressed(Part(self.source, member.start, packed), DEFLATE, f"{what}, deflated,"):
            whole.write(piece)
            if whole.tell() > member.size:
                break
        if whole.tell() != member.size:
            raise CorruptError(
                "A member of a zip archive has another size than it says.",
                place=f"{member.name} in {self.source.place}",
                expected=f"{member.size} bytes",
                found=f"{whole.tell()} bytes, or more",
            )
        return whole.getvalue()

    def _crc(self, member: Member) -> int:
        done, crc = self._checks.begun(member.name)
        for at in range(done, member.size, BLOCK_BYTES):
            piece = self.source.read(member.start + at, min(BLOCK_BYTES, member.size - at))
            crc = crc32(piece.data, crc)
        return crc

    def _compare(self, member: Member, crc: int) -> None:
        if crc != member.crc:
            raise CorruptError(
                "The checksum of stored data disagrees with the data.",
                place=f"{member.name} in {self.source.place}",
                expected=f"CRC-32 {member.crc:08x}",
                found=f"{crc:08x}",
                remedy="the file is damaged: fetch it again",
            )


def checked_member(source: Source, at: int) -> Checked | None:
    """Returns the stored member that a byte of an archive lies in, and where its CRC-32 stands.

    That is in the directory, and in the member's header or, where that leaves it out, behind its data.
    """
    start, size, count = _end(source)
    raw, entry_at = bytes_at(source, start, size), 0
    for _ in range(count):
        entry, end = _entry(source, raw, entry_at, True)
        head = bytes_at(source, entry.header, LOCAL.size)
        _, _, flags, *_, name_size, extra_size = LOCAL.unpack(head)
        begin = entry.header + LOCAL.size + name_size + extra_size
        if begin <= at < begin + entry.size and entry.packed is None:
            local = begin + entry.size + 4 if flags & _DESCRIPTOR else entry.header + 14
            return Checked(begin, entry.size, (local, start + entry_at + 16))
        entry_at = end
    return None


def directory_bytes(source: Source) -> bytes:
    """Returns the raw directory of a zip archive.

    Raises:
        FormatError: There is none at the end of the file.
    """
    return _raw_directory(source, *_end(source)[:2])


def _raw_directory(source: Source, start: int, size: int) -> bytes:
    if size <= _HELD:
        bring(source, [(max(0, start - _SMALL), min(_SMALL, start) + size)])  # with PyTorch's last members
    return record(source, start, size, None, "The directory of a zip archive")


def _end(source: Source) -> tuple[int, int, int]:
    """Returns start, size and number of entries of the central directory, which ends where the end record starts."""
    place = source.place
    at = source.size - END.size
    fields = END.unpack(bytes_at(source, at, END.size)) if at >= 0 else (0,) * 8
    if fields[0] != END_MAGIC or fields[7]:
        raise CorruptError(
            "A zip archive is cut off, or something was added behind it.",
            place=place,
            expected="an end record as the last 22 bytes",
            found=f"something else at the end of {source.size} bytes",
            remedy="compare its size with the original's, and copy or save it again",
        )
    _, disk, other, here, count, size, start, _ = fields
    locator_at = at - LOCATOR.size
    if locator_at >= 0:
        locator = LOCATOR.unpack(bytes_at(source, locator_at, LOCATOR.size))
        if locator[0] == LOCATOR_MAGIC:
            at = locator[2]
            if at + END64.size != locator_at:
                raise FormatError("The end record of a zip archive isn't where it should be.", place=place)
            wide = END64.unpack(bytes_at(source, at, END64.size))
            _same_end(source, fields, wide)
            _, _, _, _, disk, other, here, count, size, start = wide
    if disk or other or here != count or count * CENTRAL.size > size:
        raise RefusedError(
            "A zip archive has an impossible directory.",
            place=place,
            expected=f"one disk, {CENTRAL.size} bytes or more for each member",
            found=f"disk {disk}, {count} members in {size} bytes",
        )
    if start + size != at:
        raise CorruptError(
            "The directory of a zip archive isn't where it should be.",
            place=place,
            expected=f"its end at byte {at}",
            found=f"{size} bytes from byte {start} on",
        )
    return start, size, count


def _same_end(source: Source, narrow: tuple[int, ...], wide: tuple[int, ...]) -> None:
    pairs = [(narrow[4], wide[7], FULL16), (narrow[5], wide[8], FULL32), (narrow[6], wide[9], FULL32)]
    if wide[0] != END64_MAGIC or any(old not in (new, full) for old, new, full in pairs):
        raise FormatError("The two end records of a zip archive contradict each other.", place=source.place)


def _directory(source: Source, deflated: bool) -> tuple[list[_Entry], int]:
    start, size, count = _end(source)
    raw = _raw_directory(source, start, size)
    source.account.nodes(_NODES * count, "The directory of a zip archive", source.place)
    entries = []
    at = 0
    for _ in range(count):
        if at + CENTRAL.size > size:
            raise CorruptError("The directory of a zip archive is cut off.", place=source.place)
        entry, at = _entry(source, raw, at, deflated)
        entries.append(entry)
    if at != size:
        raise CorruptError(
            "The directory of a zip archive has the wrong size.", place=source.place, found=size - at
        )
    return entries, start


def _entry(source: Source, raw: bytes, at: int, deflated: bool) -> tuple[_Entry, int]:
    fields = CENTRAL.unpack_from(raw, at)
    magic, _, _, flags, method, _, _, crc, packed, size = fields[:10]
    name_size, extra_size, comment, disk, _, _, header = fields[10:]
    name_at = at + CENTRAL.size
    extra_at = name_at + name_size
    end = extra_at + extra_size + comment
    name = raw[name_at:extra_at]
    if magic != CENTRAL_MAGIC or end > len(raw):
        raise CorruptError(
            "The directory of a zip archive is damaged.", place=source.place, found=f"entry at {at}"
        )
    if FULL32 in (size, packed, header):
        size, packed, header = _wide(source, raw[extra_at : extra_at + extra_size], size, packed, header)
    inflates = deflated and method == _DEFLATED
    if flags & 1 or disk or not (inflates or (method == 0 and size == packed)):
        raise RefusedError(
            "A member of a zip archive is encrypted, or packed in a way that isn't read.",
            place=f"{name.decode('utf-8', 'replace')} in {source.place}",
            expected="bytes stored as they are" + (", or deflated" if deflated else ""),
            found=f"method {method}, flags {flags:#06x}, {packed} bytes for {size}",
        )
    if inflates and size > packed * MOST_OF_ONE[DEFLATE]:
        raise RefusedError(
            "A member of a zip archive declares more than its bytes can hold.",
            place=f"{name.decode('utf-8', 'replace')} in {source.place}",
            expected=f"at most {packed * MOST_OF_ONE[DEFLATE]} bytes",
            found=size,
        )
    return _Entry(name, header, size, crc, packed if inflates else None), end


def _wide(source: Source, extra: bytes, *narrow: int) -> list[int]:
    """Returns sizes and offset with those that don't fit 32 bits taken from the zip64 field, in its fixed order."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{size // 8}Q", extra[at + 4 : at + 4 + size]))
            numbers = [next(wide, -1) if value == FULL32 else value for value in narrow]
            if -1 not in numbers:
                return numbers
        at += 4 + size
    raise FormatError("A zip member larger than 4 GB lacks its true size.", place=source.place)


def _members(source: Source, entries: list[_Entry], directory: int) -> dict[str, Member]:
    """Finds where each member's bytes lie; they must not overlap, and names must differ."""
    ordered = sorted(entries, key=lambda entry: entry.header)
    if ordered and ordered[0].header:
        raise RefusedError(
            "A zip archive has bytes before its first member.",
            place=source.place,
            expected="a member at byte 0",
            found=f"the first at byte {ordered[0].header}",
        )
    members: dict[str, Member] = {}
    limits = [entry.header for entry in ordered[1:]] + [directory]
    for entry, limit in zip(ordered, limits, strict=True):
        name = entry.name.decode("utf-8", "surrogateescape")
        if name in members:
            raise RefusedError(
                "A zip archive has two members of one name; which one counts depends on the reader.",
                place=f"{name} in {source.place}",
            )
        locate = partial(_located, source, entry, limit)
        members[name] = Member(name, entry.size, entry.crc, entry.packed, locate)
    if is_stored(source):  # a header is read with its member
        return members
    for entry, head, limit, member in zip(
        ordered, _heads(source, ordered), limits, members.values(), strict=True
    ):
        member.start = _start(source, entry, head, limit)
    return members


def _small_runs(entries: Iterable[_Entry]) -> Iterator[tuple[int, int]]:
    """Yields first byte and number of bytes of small members, each with its header."""
    for entry in entries:
        if entry.stored <= _SMALL:
            yield entry.header, LOCAL.size + len(entry.name) + _EXTRA + entry.stored


def _located(source: Source, entry: _Entry, limit: int) -> int:
    return _start(source, entry, bytes_at(source, entry.header, LOCAL.size + len(entry.name)), limit)


def _heads(source: Source, ordered: list[_Entry]) -> Iterator[bytes]:
    """Yields the header of each of some members in order, as far as its name; those of small ones are read at once."""
    ends = [entry.header + LOCAL.size + len(entry.name) for entry in ordered]
    first = 0
    while first < len(ordered):
        start, after = ordered[first].header, first + 1
        most = min(start + _AT_ONCE, source.size)
        while (
            after < len(ordered)
            and ordered[after].header - ordered[after - 1].header <= _NEAR
            and ends[after] <= most
        ):
            after += 1
        window = bytes_at(source, start, max(ends[first:after]) - start)
        for entry, end in zip(ordered[first:after], ends[first:after], strict=True):
            yield window[entry.header - start : end - start]
        first = after


def _start(source: Source, entry: _Entry, raw: bytes, limit: int) -> int:
    """Returns where a member's bytes lie, by its header, which has to say what the directory says."""
    name = entry.name.decode("utf-8", "surrogateescape")
    magic, _, flags, method, _, _, _, _, _, name_size, extra_size = LOCAL.unpack_from(raw)
    same = raw[LOCAL.size :] == entry.name and name_size == len(entry.name)
    expected = 0 if entry.packed is None else _DEFLATED
    if magic != LOCAL_MAGIC or not same or method != expected or flags & 1:
        raise CorruptError(
            "The two headers of a zip member contradict each other.", place=f"{name} in {source.place}"
        )
    start: int = entry.header + LOCAL.size + name_size + extra_size
    if start + entry.stored > limit:
        raise CorruptError(
            "A member of a zip archive overlaps the next one.",
            place=f"{name} in {source.place}",
            expected=f"at most {max(limit - start, 0)} bytes",
            found=f"{entry.stored} bytes",
        )
    return start


@dataclass(frozen=True)
class ZipForm:
    """What programs that store the same members in a zip archive do differently.

    Attributes:
        root: What stands before every name.
        alignment: Bytes that members are padded to; 0 for none.
        version: The version said to be needed, where 64-bit fields aren't.
        date: The date, as a zip archive has it.
    """

    root: str
    alignment: int
    version: int
    date: int


class ZipWriter:
    """Writes members one after the other without going back, so that nothing is held but a block."""

    def __init__(self, file: BinaryIO, form: ZipForm) -> None:
        self._file, self._form = file, form
        self._pending = bytearray()
        self._at = 0
        self._directory = bytearray()
        self._count = 0

    def add(self, name: str, size: int, blocks: Iterable[bytes | memoryview]) -> None:
        """Writes one member of known size."""
        form = self._form
        raw = f"{form.root}{name}".encode()
        header_at = self._at
        wide = _wide_field(size, size, header_at)
        flags = _UTF8 | (_DESCRIPTOR if size else 0)
        body_at = header_at + LOCAL.size + len(raw) + len(wide)
        extra = wide + (_padding(body_at, form.alignment) if form.alignment else b"")
        version = 45 if wide else form.version
        head = LOCAL.pack(LOCAL_MAGIC, version, flags, 0, 0, form.date, 0, 0, 0, len(raw), len(extra))
        self._put(head + raw + extra)
        data_at, crc = self._at, 0
        for block in blocks:
            crc = crc32(block, crc)
            self._put(block)
        if self._at - data_at != size:
            raise CommitError(
                "A tensor gave other bytes than its shape says.",
                place=name,
                expected=f"{size} bytes",
                found=f"{self._at - data_at} bytes",
            )
        if size:
            self._put(struct.pack("<IIQQ" if wide else "<IIII", _DESCRIPTOR_MAGIC, crc, size, size))
        self._directory += CENTRAL.pack(
            CENTRAL_MAGIC, version, version, flags, 0, 0, form.date, crc, _narrow(size), _narrow(size),
            len(raw), len(wide), 0, 0, 0, 0, _narrow(header_at),
        )  # fmt: skip
        self._directory += raw + wide
        self._count += 1

    def finish(self) -> None:
        """Writes the directory, with 64-bit records where they are needed."""
        at, size = self._at, len(self._directory)
        self._put(self._directory)
        if self._count >= FULL16 or size >= WIDE_FROM or at >= WIDE_FROM:
            end_at = self._at
            self._put(
                END64.pack(END64_MAGIC, END64.size - 12, 45, 45, 0, 0, self._count, self._count, size, at)
            )
            self._put(LOCATOR.pack(LOCATOR_MAGIC, 0, end_at, 1))
        count = min(self._count, FULL16)
        self._put(END.pack(END_MAGIC, 0, 0, count, count, _narrow(size), _narrow(at), 0))
        self._file.write(self._pending)

    def _put(self, data: bytes | bytearray | memoryview) -> None:
        self._at += len(data)
        if (
            len(data) < _ALONE and len(self._pending) + len(data) < GATHERED
        ):  # each write of a stage's file is a system call
            self._pending += data
        else:
            self._file.write(self._pending)
            self._file.write(data)
            self._pending = bytearray()


def _narrow(number: int) -> int:
    return FULL32 if number >= WIDE_FROM else number


def _wide_field(*numbers: int) -> bytes:
    """Returns the zip64 field of a header: its sizes and offset that don't fit 32 bits."""
    large = [n for n in numbers if n >= WIDE_FROM]
    return struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""


def _padding(at: int, alignment: int) -> bytes:
    count = -(at + 4) % alignment
    return struct.pack("<2sH", b"FB", count) + b"Z" * count
