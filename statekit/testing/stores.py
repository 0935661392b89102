"""Trees for tests: one in memory, and one that counts what it is asked for.

tree = CountingTree(MemoryTree.of(Path("run")))
place = StoredPlace(tree, PurePosixPath("run"))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Self

from blake3 import blake3

from statekit.errors import CorruptError
from statekit.files.ahead import ReadAhead
from statekit.files.tree import Facts, FileTree, StoredPlace


@dataclass
class MemoryTree:
    """A store in memory, which keeps to what it was listed as: a file that is written anew isn't read any more.

    Attributes:
        data: Bytes by name.
        place: Where it begins, for messages.
    """

    data: dict[str, bytes]
    place: str = "memory://store"
    _listed: dict[str, Facts] = field(init=False)
    _first: dict[str, bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Lists the files, and the folders that they lie in."""
        self._listed, self._first = {"": Facts("", "folder")}, dict(self.data)
        for name, content in self.data.items():
            self._listed[name] = Facts(name, "file", len(content), blake3(content).hexdigest(), 1)
            for folder in PurePosixPath(name).parents:
                if folder.parts:
                    self._listed[f"{folder}"] = Facts(f"{folder}", "folder")

    @classmethod
    def of(cls, path: Path) -> Self:
        """Returns a store that holds a file, or all files of a folder, under its name."""
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        return cls({file.relative_to(path.parent).as_posix(): file.read_bytes() for file in files})

    def facts(self, name: str) -> Facts | None:
        return self._listed.get(name)

    def names(self, folder: str) -> Sequence[str]:
        return sorted(
            name.rpartition("/")[2] for name in self._listed if name and name.rpartition("/")[0] == folder
        )

    def read_into(self, facts: Facts, start: int, into: memoryview) -> None:
        content = self.data.get(facts.name)
        if content is None or content is not self._first[facts.name]:
            raise CorruptError("A file was changed while it was read.", place=f"{self.place}/{facts.name}")
        into[:] = content[start : start + len(into)]


@dataclass
class CountingTree:
    """A tree that notes each read of another one.

    Attributes:
        tree: The other.
        reads: Name, first byte and number of bytes of each read.
    """

    tree: FileTree
    reads: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def place(self) -> str:
        return self.tree.place

    def facts(self, name: str) -> Facts | None:
        return self.tree.facts(name)

    def names(self, folder: str) -> Sequence[str]:
        return self.tree.names(folder)

    def read_into(self, facts: Facts, start: int, into: memoryview) -> None:
        self.reads.append((facts.name, start, len(into)))
        self.tree.read_into(facts, start, into)


def stored(path: Path) -> tuple[StoredPlace, CountingTree]:
    """Returns a file or a folder of this machine as it would lie in a store, and what counts its requests."""
    counting = CountingTree(MemoryTree.of(path))
    return StoredPlace(ReadAhead(counting), PurePosixPath(path.name)), counting
