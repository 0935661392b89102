"""What a disk holds after the power went: what was synced, and of the rest whatever it had come to write by itself.

A file's bytes last when the file is synced, a name when a folder is synced in which it was given or taken; until then
both may be there or not, in any order, for disks and file systems write when they like. A rename within a folder is one
change, one from a folder to another is two. Of bytes that weren't synced a file has none, or all, or zeros in their
place, or the first half. No promise that only some file systems give is relied on: that a synced file has its name,
that a file that takes another's name has its bytes, or that changes last in the order in which they were made.
"""

from __future__ import annotations

import base64
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

ROOT = 1
"""The number of the file system's own folder."""
FEW = 6
"""Of so many unsynced changes every subset is looked at."""
SUBSETS = 8
"""How many subsets are drawn of more, besides none, all, and those of one folder."""

Call: TypeAlias = list[Any]
Names: TypeAlias = dict[int, dict[str, int]]
Contents: TypeAlias = dict[str, bytes | None]
"""What a path holds: bytes by relative name, None for a folder; the path itself is the name ""."""
Bytes: TypeAlias = Callable[[int], bytes]


@dataclass(frozen=True)
class Change:
    """A change of the names in a folder, all at once: each name, and what has it from then on."""

    folder: int
    edits: tuple[tuple[str, int | None], ...]

    def apply(self, names: Names) -> None:
        entries = names.setdefault(self.folder, {})
        for name, number in self.edits:
            if number is None:
                entries.pop(name, None)
            else:
                entries[name] = number


@dataclass
class Disk:
    """A disk at work.

    Attributes:
        names: What each folder holds, as processes see it.
        data: The bytes of each file, as processes see them.
        lasting_names: What each folder holds for certain.
        lasting_data: The bytes that each file has for certain.
        pending: The changes of names that weren't synced, in their order.
    """

    names: Names = field(default_factory=lambda: {ROOT: {}})
    data: dict[int, bytearray] = field(default_factory=dict)
    lasting_names: Names = field(default_factory=lambda: {ROOT: {}})
    lasting_data: dict[int, bytes] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def take(self, call: Call) -> None:
        """Does what a line of the journal says."""
        kind, *arguments = call
        if kind == "sync":
            self._sync(*arguments)
        elif kind == "write":
            number, start, text = arguments
            block = base64.b64decode(text)
            self.data[number][len(self.data[number]) :] = bytes(max(0, start - len(self.data[number])))
            self.data[number][start : start + len(block)] = block
        elif kind == "resize":
            number, size = arguments
            self.data[number][size:] = bytes(max(0, size - len(self.data[number])))
        else:
            for change in self._changes(kind, *arguments):
                change.apply(self.names)
                self.pending.append(change)

    def sync_all(self) -> None:
        """Makes everything last, as time does."""
        for change in self.pending:
            change.apply(self.lasting_names)
        self.pending.clear()
        self.lasting_data = {number: bytes(data) for number, data in self.data.items()}

    def _sync(self, number: int) -> None:
        if number in self.data:
            self.lasting_data[number] = bytes(self.data[number])
            return
        for change in self.pending:
            if change.folder == number:
                change.apply(self.lasting_names)
        self.pending = [change for change in self.pending if change.folder != number]

    def _changes(self, kind: str, folder: int, name: str, *more: Any) -> list[Change]:
        if kind in ("folder", "file", "link"):
            [number] = more
            if kind == "folder":
                self.names[number] = {}
            elif kind == "file":
                self.data[number] = bytearray()
            return [Change(folder, ((name, number),))]
        if kind == "remove":
            return [Change(folder, ((name, None),))]
        assert kind in ("rename", "exchange"), kind
        to, new = more
        leaves = (name, self.names[to][new] if kind == "exchange" else None)
        takes = (new, self.names[folder][name])
        if to == folder:
            return [Change(folder, (leaves, takes))]
        return [Change(folder, (leaves,)), Change(to, (takes,))]

    def survivors(self, chance: random.Random) -> Iterator[tuple[str, Names, Mapping[str, Bytes]]]:
        """Yields what may be on the disk if the power goes now: which names, and each way in which bytes may be."""
        for what, kept in self._subsets(chance):
            names = {folder: dict(self.lasting_names.get(folder, {})) for folder in self.names}
            for change in kept:
                change.apply(names)
            yield what, names, self._bytes(chance)

    def _subsets(self, chance: random.Random) -> Iterator[tuple[str, Iterable[Change]]]:
        if len(self.pending) <= FEW:
            for kept in itertools.product((False, True), repeat=len(self.pending)):
                yield f"of the last names {[*kept]}", itertools.compress(self.pending, kept)
            return
        yield "no unsynced name", ()
        yield "every name", self.pending
        for folder in sorted({change.folder for change in self.pending}):
            yield f"names in folder {folder}", [one for one in self.pending if one.folder == folder]
        for number in range(SUBSETS):
            yield f"some names ({number})", [one for one in self.pending if chance.random() < 0.5]

    def _bytes(self, chance: random.Random) -> Mapping[str, Bytes]:
        def synced(number: int) -> bytes:
            return self.lasting_data.get(number, b"")

        def every(number: int) -> bytes:
            return bytes(self.data[number])

        def zeros(number: int) -> bytes:
            return synced(number) if synced(number) == every(number) else bytes(len(self.data[number]))

        def half(number: int) -> bytes:
            return (
                synced(number)
                if synced(number) == every(number)
                else every(number)[: len(every(number)) // 2]
            )

        seed = chance.random()

        def some(number: int) -> bytes:
            return every(number) if random.Random(f"{seed} {number}").random() < 0.5 else synced(number)

        return {"synced bytes": synced, "all bytes": every, "zeros": zeros, "half": half, "some": some}


def contents(names: Names, data: Bytes, path: str) -> Contents | None:
    """Returns what a path of the file system holds; None if it isn't there."""
    at = ROOT
    for name in path.split("/"):
        if name not in names.get(at, {}):
            return None
        at = names[at][name]
    return _below(names, data, at, "")


def _below(names: Names, data: Bytes, number: int, name: str) -> Contents:
    if number not in names:
        return {name: data(number)}
    below: Contents = {name: None}
    for entry, child in names[number].items():
        below |= _below(names, data, child, f"{name}/{entry}" if name else entry)
    return below


def read_journal(path: Path) -> list[Call]:
    """Reads what the file system has written down."""
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        return [json.loads(line) for line in lines]
