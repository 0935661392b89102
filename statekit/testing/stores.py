"""Trees for tests, in memory and counting, and the laws that every tree obeys; whoever writes one inherits them.

tree = CountingTree(MemoryTree.of(Path("run")))
place = StoredPlace(tree, PurePosixPath("run"))

@pytest.mark.parametrize("law", TREE_LAWS)
def test_my_tree_obeys(law: str) -> None:
    TREE_LAWS[law](TreeTrial(lambda files: MyTree(files), change, fail))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Self, TypeAlias

from blake3 import blake3

from statekit.errors import CorruptError, StatekitError
from statekit.files.ahead import ReadAhead
from statekit.files.tree import Facts, FileTree, StoredPlace, fill


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
        fill(into, content[start : start + len(into)], start, f"{self.place}/{facts.name}")


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


SECRET = "a-secret-of-the-store"
"""What no message may show: a trial's store repeats it in its errors, as real ones do with a key."""
CONTENTS: Mapping[str, bytes] = {
    "run/a": bytes(range(256)) * 1024,
    "run/deep/er/b": b"1",
    "run/empty": b"",
    "beside": b"other",
}
HOSTILE = (
    "run/ a b",
    "run/%2e%2e",
    "run/a#b?c=d&e",
    "run/\u00e4\u65e5",
    "run/" + "n" * 200,
    "run/a+b",
    "run/..a",
)


@dataclass(frozen=True)
class TreeTrial:
    """A tree of somebody's, on trial.

    Attributes:
        listed: Makes a store that holds some files, and returns the tree of it, not yet asked for anything.
        change: Puts other bytes in a file's place in that store; None where a listed state can't change.
        fail: Has the store refuse all from now on, with a text that holds `SECRET`; None if it can't.
    """

    listed: Callable[[Mapping[str, bytes]], FileTree]
    change: Callable[[str, bytes], object] | None = None
    fail: Callable[[], object] | None = None


TreeLaw: TypeAlias = Callable[[TreeTrial], None]


def _file(tree: FileTree, name: str) -> Facts:
    facts = tree.facts(name)
    assert facts is not None and facts.kind == "file", f"{name} isn't there"
    return facts


def _read(tree: FileTree, facts: Facts, start: int, count: int) -> bytes:
    into = bytearray(count)
    tree.read_into(facts, start, memoryview(into))
    return bytes(into)


def names_are_those_of_the_store(trial: TreeTrial) -> None:
    """Folders and files are told apart, names are sorted, and nothing else is there."""
    tree = trial.listed(CONTENTS)
    assert tree.names("run") == ["a", "deep", "empty"] and tree.names("run/deep") == ["er"]
    folder = tree.facts("run/deep")
    assert folder is not None and folder.kind == "folder" and not folder.identity
    for name, data in CONTENTS.items():
        facts = _file(tree, name)
        assert (facts.name, facts.size) == (name, len(data)) and facts.identity
    for name in ("run/b", "ru", "run/a/b", "run/deep/er/b/c"):
        assert tree.facts(name) is None and not tree.names(name)


def any_part_of_a_file_is_read(trial: TreeTrial) -> None:
    """A read gives the bytes that were asked for."""
    tree, data = trial.listed(CONTENTS), CONTENTS["run/a"]
    facts = _file(tree, "run/a")
    for start, count in ((0, 1), (0, len(data)), (len(data) - 1, 1), (1000, 5000)):
        assert _read(tree, facts, start, count) == data[start : start + count]
    assert _read(tree, _file(tree, "run/deep/er/b"), 0, 1) == b"1"


def a_listing_is_a_snapshot(trial: TreeTrial) -> None:
    """What comes later isn't there."""
    tree = trial.listed(CONTENTS)
    before = list(tree.names("run"))
    if trial.change is not None:
        trial.change("run/later", b"new")
        assert tree.names("run") == before and tree.facts("run/later") is None


def a_file_that_changes_is_named(trial: TreeTrial) -> None:
    """A file that was written anew, or is shorter, is an error that names it, and never gives other bytes."""
    for data in (bytes(reversed(CONTENTS["run/a"])), CONTENTS["run/a"][:100]):
        tree = trial.listed(CONTENTS)
        facts = _file(tree, "run/a")
        if trial.change is None:
            return
        trial.change("run/a", data)
        try:
            _read(tree, facts, 0, 200)
        except CorruptError as error:
            assert f"{error.place}".endswith("run/a"), error
        else:
            raise AssertionError("a file that changed was read")


def more_than_there_is_is_an_error(trial: TreeTrial) -> None:
    """A read that ends behind a file's end fails, and doesn't come back short."""
    tree = trial.listed(CONTENTS)
    facts = _file(tree, "run/a")
    try:
        _read(tree, facts, facts.size - 1, 2)
    except StatekitError:
        return
    raise AssertionError("more was read than there is")


def any_name_is_one(trial: TreeTrial) -> None:
    """Names with signs that mean something in an address name the files that they name."""
    contents = {name: name.encode() for name in HOSTILE}
    tree = trial.listed(contents)
    assert sorted(f"run/{name}" for name in tree.names("run")) == sorted(contents)
    for name, data in contents.items():
        assert _read(tree, _file(tree, name), 0, len(data)) == data, name


def a_thousand_names_are_listed(trial: TreeTrial) -> None:
    """A folder of 1200 names lists each."""
    names = [f"run/{number:05}" for number in range(1200)]
    tree = trial.listed(dict.fromkeys(names, b"1"))
    assert [f"run/{name}" for name in tree.names("run")] == names


def no_message_shows_a_secret(trial: TreeTrial) -> None:
    """An error is one of ours, and repeats nothing of what the store said."""
    tree = trial.listed(CONTENTS)
    if trial.fail is None:
        return
    facts = _file(tree, "run/a")
    trial.fail()
    shown = []
    with suppress(StatekitError):
        try:
            _read(tree, facts, 0, 200)
        except StatekitError as error:
            shown = [f"{error!r} {error} {error.__cause__}"]
            raise
    assert shown and SECRET not in shown[0] and "a" in shown[0]


TREE_LAWS: Mapping[str, TreeLaw] = {
    law.__name__: law
    for law in (
        names_are_those_of_the_store,
        any_part_of_a_file_is_read,
        a_listing_is_a_snapshot,
        a_file_that_changes_is_named,
        more_than_there_is_is_an_error,
        any_name_is_one,
        a_thousand_names_are_listed,
        no_message_shows_a_secret,
    )
}
