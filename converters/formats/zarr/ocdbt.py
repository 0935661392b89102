"""The structure of an OCDBT database, walked before tensorstore reads it.

tensorstore makes lists as long as a record says that they are, so that 65 kB could take all memory and end the process.
Here the newest version's records are read first: a count is held against the bytes of its record, and these against
the budget. Values are not read.

Source: tensorstore 0.1.86, kvstore/ocdbt/format, `manifest`, `version_tree`, `btree`, `data_file_id`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from statekit.budget import Account
from statekit.converters.formats.crc import crc32c
from statekit.converters.formats.storage import decompressed
from statekit.converters.formats.tensor_bundle.table import varint
from statekit.errors import CorruptError, FormatError, NotFoundError, RefusedError
from statekit.files.durable import new_file
from statekit.files.source import Files, Held, bring, bytes_at, require
from statekit.files.tree import Place, checked_key

MANIFEST = "manifest.ocdbt"
_MANIFEST_MAGIC, _NODE_MAGIC = b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde"
_UUID, _LEVEL = 16, 4
"""Bytes of a database's name, and of the level of its compression."""
_NONE = 2**64 - 1
"""The offset of a root that isn't there."""


@dataclass(frozen=True)
class Node:
    """Where a node lies: its file below the database, its first byte, its size, and how far it is from the leaves."""

    path: str
    offset: int
    length: int
    height: int


def check_database(folder: Place, files: Files) -> set[Node]:
    """Walks the newest version of a database, each node once; returns where they lie.

    Raises:
        BudgetError: A record becomes more than the job may hold, or lists more than its bytes explain.
        CorruptError: A record is damaged.
        FormatError: A record breaks the format.
        RefusedError: It names a file outside the database, or numbers its manifests.
    """
    with _record(files, folder / MANIFEST, 0, None) as (data, place, taken):
        waiting = [*_Fields(data, _MANIFEST_MAGIC, place, taken).roots()]
    visited = set(waiting)
    while waiting:
        node = waiting.pop()
        with _record(files, folder / node.path, node.offset, node.length) as (data, place, taken):
            fields = _Fields(data, _NODE_MAGIC, place, taken)
            waiting += [child for child in fields.children(node) if child not in visited]
        visited.update(waiting)
    return visited


def copy_structure(folder: Place, to: Path) -> None:
    """Makes a database of the same structure on this machine, in which the values are holes of its files.

    Whoever joins databases looks at what refers to values, and never at a value.

    Raises:
        As `check_database`.
    """
    with Files() as files:
        nodes = check_database(folder, files)
        size = files.source(folder / MANIFEST).size
        for path in {MANIFEST, *(node.path for node in nodes)}:
            source = files.source(folder / path)
            with new_file(to / path, synced=False) as output:
                for node in nodes if path != MANIFEST else [Node(MANIFEST, 0, size, 0)]:
                    if node.path == path:
                        output.seek(node.offset)
                        output.write(bytes_at(source, node.offset, node.length))


@contextmanager
def _record(files: Files, path: Place, start: int, count: int | None) -> Iterator[tuple[bytes, str, Account]]:
    """Gives a record's bytes, its place for errors, and what is held of the budget as long as it is parsed."""
    try:
        source = files.source(path)
    except NotFoundError:
        raise CorruptError("A file of an OCDBT database is missing.", place=path) from None
    count = source.size - start if count is None else count
    require(source, start, count)
    place = f"byte {start} of {source.place}"
    with files.account.passing() as taken:
        taken.hold(count, "A record of OCDBT", place)
        bring(source, [(start, count)])
        yield bytes_at(source, start, count), place, taken


class _Fields:
    """The fields of one record, read forwards."""

    def __init__(self, data: bytes, magic: bytes, place: str, account: Account) -> None:
        self._place, self._account = place, account
        if data[:4] != magic or len(data) < 18 or int.from_bytes(data[4:12], "little") != len(data):
            raise CorruptError("A record of OCDBT is cut off, or none.", place=place, expected=magic.hex())
        if crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise CorruptError("A record of OCDBT doesn't fit its checksum.", place=place)
        version, at = varint(data, 12, place)
        compression, at = varint(data, at, place)
        if version != 0 or compression > 1:
            raise FormatError(
                "A record of OCDBT has a version or a compression that statekit doesn't know.",
                place=place,
                found=f"{version}, {compression}",
            )
        self._data, self._at = data[at:-4], 0
        if compression:
            whole = bytearray()
            for piece in decompressed(Held(self._data, place, account), "zstd", "A record of OCDBT"):
                account.hold(len(piece), "A record of OCDBT", place)
                whole += piece
            self._data = bytes(whole)

    def roots(self) -> Iterator[Node]:
        """Yields where the newest version of a manifest begins."""
        self._bytes(_UUID)
        if self._number() != 0:
            raise RefusedError("An OCDBT database numbers its manifests.", place=self._place)
        self._numbers(2)
        self._bytes(1)
        if self._number():
            self._bytes(_LEVEL)
        paths = self._paths()
        count = self._count("versions")
        self._numbers(count)
        heights = self._bytes(count)
        yield from [*self._locations(paths, heights)][-1:]

    def children(self, node: Node) -> Iterator[Node]:
        """Yields where the nodes below a node lie."""
        height = self._bytes(1)[0]
        if height != node.height:
            raise FormatError(
                "A node of OCDBT stands at another height.", place=self._place, expected=node.height
            )
        paths = self._paths()
        if height == 0:
            return
        count = self._count("entries")
        self._numbers(max(count - 1, 0))
        key_bytes = sum(self._numbers(count))
        self._numbers(count)
        self._bytes(key_bytes)
        yield from self._locations(paths, bytes([height - 1]) * count)

    def _locations(self, paths: list[str], heights: bytes) -> Iterator[Node]:
        columns = [self._numbers(len(heights)) for _ in range(3)]
        for number, offset, length, height in zip(*columns, heights, strict=True):
            if offset == _NONE:
                continue
            if number >= len(paths):
                raise FormatError("A record of OCDBT names a file that it doesn't list.", place=self._place)
            path = "/".join(checked_key(paths[number], self._place))
            yield Node(path, offset, length, height)

    def _paths(self) -> list[str]:
        """Returns the files that a record refers to, below the database's folder."""
        count = self._count("files")
        shared = [0, *self._numbers(max(count - 1, 0))]
        added, _ = self._numbers(count), self._numbers(count)
        paths, last = list[str](), b""
        for start, size in zip(shared[:count], added, strict=True):
            last = last[:start] + self._bytes(size)
            self._account.hold(len(last), "The files of a record of OCDBT", self._place)
            paths.append(last.decode("utf-8", "replace"))
        return paths

    def _count(self, what: str) -> int:
        count = self._number()
        if count > len(self._data) - self._at:
            raise FormatError(
                f"A record of OCDBT lists more {what} than it has bytes.", place=self._place, found=count
            )
        self._account.nodes(count, f"The {what} of a record of OCDBT", self._place)
        return count

    def _number(self) -> int:
        number, self._at = varint(self._data, self._at, self._place)
        return number

    def _numbers(self, count: int) -> list[int]:
        self._account.step(count, "A record of OCDBT", self._place)
        return [self._number() for _ in itertools.repeat(None, count)]

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise FormatError("A record of OCDBT is cut off.", place=self._place)
        self._at += count
        return self._data[self._at - count : self._at]
