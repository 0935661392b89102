"""Where the files of a checkpoint lie, on a disk or in a store that was listed, and how a user names them.

A `Place` is a name of a file or a folder. `pathlib.Path` is one, of this machine; `StoredPlace` is the other, of a
`FileTree`. Whatever reads checkpoints takes places, and asks them by pathlib's own names.

    place = checkpoint_place("s3://bucket/run")  # of statekit.files.source
    (place / "model.safetensors").is_file()

A tree in a store is a snapshot: it is listed once, and each read is pinned to what the listing says. What has changed
since is an error, never a mix of two states.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal, Protocol, Self, TypeVar

from statekit.errors import CorruptError, RefusedError, UsageError, printable

STORES = ("s3", "gs", "az")
"""The schemes of object stores that are read."""
_COPIES = {
    "s3": "aws s3 cp --recursive {} LOCAL_FOLDER/",
    "gs": "gcloud storage cp -r {} LOCAL_FOLDER/",
    "az": "azcopy copy {} LOCAL_FOLDER/ --recursive",
    "hf": "hf download REPOSITORY --local-dir LOCAL_FOLDER",
}
_FILE_COPIES = {"s3": "aws s3 cp {} {}", "gs": "gcloud storage cp {} {}", "az": "azcopy copy {} {}"}

WORK = ".statekit-work-"
"""What the name of a folder in a store begins with that says who writes the target of the rest of the name."""


@dataclass(frozen=True)
class Facts:
    """What a tree knows of a file or a folder without reading it.

    Attributes:
        name: Its name in the tree, parts joined by `/`.
        kind: What it is.
        size: Its size in bytes; 0 of a folder.
        identity: What a read is pinned to: an ETag, or a commit and a digest; "" of a folder.
        changed: When it was last written to, in nanoseconds since 1970; None if the tree doesn't say.
    """

    name: str
    kind: Literal["file", "folder"]
    size: int = 0
    identity: str = ""
    changed: int | None = None


class FileTree(Protocol):
    """The files of a store, as they were when they were listed."""

    @property
    def place(self) -> str:
        """Where the tree begins, as a user names it: `s3://bucket`."""

    def facts(self, name: str) -> Facts | None:
        """Returns what is known of a name; None if nothing is there.

        Raises:
            FormatError: The store doesn't say.
        """

    def names(self, folder: str) -> Sequence[str]:
        """Returns the names directly in a folder, sorted; none of what is no folder.

        Raises:
            FormatError: The store doesn't say.
        """

    def read_into(self, facts: Facts, start: int, into: memoryview) -> None:
        """Fills a byte buffer from byte `start` of a file on.

        Raises:
            CorruptError: The file isn't the one that was listed any more, or is shorter.
            FormatError: The store doesn't give it.
        """


class Place(Protocol):
    """The name of a file or a folder, which may be there or not. The members mean what they mean in pathlib."""

    @property
    def name(self) -> str: ...
    @property
    def stem(self) -> str: ...
    @property
    def suffix(self) -> str: ...
    @property
    def parts(self) -> tuple[str, ...]: ...
    @property
    def parent(self) -> Self: ...
    @property
    def parents(self) -> Sequence[Self]: ...
    def __truediv__(self, name: str, /) -> Self: ...
    def __lt__(self, other: Any, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __fspath__(self) -> str: ...
    def with_name(self, name: str, /) -> Self: ...
    def with_suffix(self, suffix: str, /) -> Self: ...
    def relative_to(self, other: Any, /) -> PurePath: ...
    def is_relative_to(self, other: Any, /) -> bool: ...
    def is_file(self) -> bool: ...
    def is_dir(self) -> bool: ...
    def is_symlink(self) -> bool: ...
    def exists(self) -> bool: ...
    def absolute(self) -> Self: ...


AnyPlace = TypeVar("AnyPlace", bound=Place)


@dataclass(frozen=True)
class StoredPlace:
    """A place in a tree. A name that leads out of the tree names nothing.

    Attributes:
        tree: The tree.
        path: The name in it; `.` is the whole tree.
    """

    tree: FileTree = field(repr=False, compare=False)
    path: PurePosixPath
    _root: str = field(init=False)

    def __post_init__(self) -> None:
        """Notes the tree's name: places of two trees differ by it."""
        object.__setattr__(self, "_root", self.tree.place)

    def __str__(self) -> str:
        return f"{self._root}/{self.path}" if self.path.parts else self._root

    def __lt__(self, other: StoredPlace) -> bool:
        return (self._root, self.path) < (other._root, other.path)

    def __truediv__(self, name: str) -> StoredPlace:
        return StoredPlace(self.tree, self.path / name)

    def __fspath__(self) -> str:
        """Refuses a look at the place by anything that reads local files only.

        Raises:
            RefusedError: Always.
        """
        raise RefusedError(
            "This is read from local files only.",
            place=self,
            expected="a path of this machine",
            remedy=f"copy it first: {copying(f'{self}')}",
        )

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def stem(self) -> str:
        return self.path.stem

    @property
    def suffix(self) -> str:
        return self.path.suffix

    @property
    def parts(self) -> tuple[str, ...]:
        return self.path.parts

    @property
    def parent(self) -> StoredPlace:
        return StoredPlace(self.tree, self.path.parent)

    @property
    def parents(self) -> Sequence[StoredPlace]:
        return [StoredPlace(self.tree, parent) for parent in self.path.parents]

    def with_name(self, name: str) -> StoredPlace:
        return StoredPlace(self.tree, self.path.with_name(name))

    def with_suffix(self, suffix: str) -> StoredPlace:
        return StoredPlace(self.tree, self.path.with_suffix(suffix))

    def relative_to(self, other: Any) -> PurePosixPath:
        """Returns the way from another place of the tree to this.

        Raises:
            ValueError: It doesn't lie below the other.
        """
        if not isinstance(other, StoredPlace) or other._root != self._root:
            raise ValueError(f"{self} isn't below {other}")
        return self.path.relative_to(other.path)

    def is_relative_to(self, other: Any) -> bool:
        return (
            isinstance(other, StoredPlace)
            and other._root == self._root
            and self.path.is_relative_to(other.path)
        )

    def is_file(self) -> bool:
        return self.facts is not None and self.facts.kind == "file"

    def is_dir(self) -> bool:
        return self.facts is not None and self.facts.kind == "folder"

    def is_symlink(self) -> bool:
        return False

    def exists(self) -> bool:
        return self.facts is not None

    def absolute(self) -> StoredPlace:
        return self

    @cached_property
    def facts(self) -> Facts | None:
        """What the tree knows of it; None if nothing is there."""
        is_inside = not self.path.is_absolute() and ".." not in self.path.parts
        return self.tree.facts("/".join(self.path.parts)) if is_inside else None

    def entries(self) -> list[StoredPlace]:
        """Returns what is directly in it, sorted; nothing of what is no folder."""
        return [self / name for name in self.tree.names("/".join(self.path.parts))] if self.is_dir() else []

    def walked(self) -> Iterator[tuple[StoredPlace, list[str], list[str]]]:
        """Walks it as `os.walk` does, from the top."""
        entries = self.entries()
        folders = [entry.name for entry in entries if entry.is_dir()]
        if self.is_dir():
            yield self, folders, [entry.name for entry in entries if entry.is_file()]
        for name in folders:
            yield from (self / name).walked()

    def files(self) -> Iterator[Facts]:
        """Yields the facts of the file itself, or of each file below the folder."""
        if self.facts is not None and self.facts.kind == "file":
            yield self.facts
        for entry in self.entries():
            yield from entry.files()


def fill(into: memoryview, data: bytes | memoryview, start: int, place: str) -> None:
    """Puts what a store answered into a buffer, if it is all that was asked for.

    Raises:
        CorruptError: The answer is of another length.
    """
    if len(data) != len(into):
        raise CorruptError(
            "A store sent another number of bytes than it was asked for.",
            place=f"byte {start} of {place}",
            expected=f"{len(into)} bytes",
            found=f"{len(data)} bytes",
            remedy="try again; a proxy in between may cut answers",
        )
    into[:] = data


def absolute(place: Place) -> Place:
    """Returns a place whose name doesn't depend on the folder where the job runs."""
    return Path(os.path.abspath(place)) if isinstance(place, Path) else place


def spelled(place: object) -> str:
    """Returns a place, or a place's text, as text by which equal places are equal."""
    text = f"{place}"
    return text if "://" in text else os.path.abspath(text)


def below(text: str, folder: Place) -> str:
    """Returns the name in a folder of a place's text, which may lie elsewhere."""
    return (
        text.removeprefix(f"{folder}/") if isinstance(folder, StoredPlace) else os.path.relpath(text, folder)
    )


def size_of(place: Place) -> int:
    """Returns the size of a file in bytes; 0 if unknown."""
    facts = stat_of(place)
    return facts.size if facts else 0


def stat_of(place: Place) -> Facts | None:
    """Returns what is known of a place without reading it; None if nothing is there, or it may not be looked at.

    A link counts as what it leads to.
    """
    if isinstance(place, StoredPlace):
        return place.facts
    try:
        facts = os.stat(place)
    except (OSError, ValueError):
        return None
    identity = f"{facts.st_dev}:{facts.st_ino}:{facts.st_mtime_ns}"
    kind: Literal["file", "folder"] = "folder" if stat.S_ISDIR(facts.st_mode) else "file"
    return Facts(f"{place}", kind, facts.st_size, identity, facts.st_mtime_ns)


_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""What may name a bucket, a container, or an owner on the Hub, in any of the services."""


def address_of(text: str) -> tuple[str, str, str]:
    """Returns the scheme of an address, its bucket, and the name there, without slashes around it.

    Raises:
        UsageError: It names no bucket, or has a password, a query, a fragment or a name that leads elsewhere. None of
            it is shown.
    """
    scheme, _, rest = text.partition("://")
    bucket, _, name = rest.partition("/")
    name = name.strip("/")
    if "@" in bucket or ":" in bucket or {*text} & {*"?#"}:
        raise UsageError(
            "An address has no password and no query.",
            place=f"{scheme}://",
            expected=f"{scheme}://BUCKET/NAME",
            remedy="leave them out: credentials are taken from the environment",
        )
    # obstore ends the process at some of these.
    is_unusable = not _BUCKET.fullmatch(bucket) or not name.isprintable()
    if is_unusable or any(part in ("", ".", "..") for part in name.split("/")[: None if name else 0]):
        raise UsageError("This address names nothing.", place=text, expected=f"{scheme}://BUCKET/NAME")
    return scheme, bucket, name


def shown_address(text: str) -> str:
    """Returns an address of whatever kind as an error may show it: without a user, a password or a query.

    Example:
        >>> shown_address("https://user:word@host/run?token=1")
        'https://host/run'
    """
    scheme, separator, rest = text.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path.partition('?')[0].partition('#')[0]}"


def local_path(source: str) -> Path:
    """Returns the path of this machine that a user names.

    Raises:
        UsageError: It is empty, or the address of something that isn't on this machine.
    """
    if not source:
        raise UsageError(
            "A path is empty, as that of a variable without a value is.",
            expected="a file or folder; . is the one where you are",
        )
    if "\0" in source or not _is_encodable(source):
        raise UsageError("No file can have this name.", place=printable(source))
    scheme, separator, rest = source.partition("://")
    if separator and scheme != "file":
        raise UsageError(
            "This must be a path of this machine.",
            place=shown_address(source),
            remedy=f"use a local folder, and copy from or to it: {copying(shown_address(source))}",
        )
    return Path(rest if separator else source)


def not_written(place: object) -> UsageError:
    """Returns the error of a target where nothing is written."""
    return UsageError(
        "Checkpoints aren't written there.",
        place=place,
        expected="a path of this machine, or s3://, gs:// or az://",
        remedy="write to a disk, and upload that: hf upload REPOSITORY LOCAL_FOLDER",
    )


def _is_encodable(path: str) -> bool:
    """Tells whether a path has bytes: JSON may hold halves of characters, and only some of these stand for bytes."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def copying_to(address: str, copy: str, is_file: bool) -> str:
    """Returns the command that copies a file or a folder from an address to a path of this machine."""
    if is_file:
        return _FILE_COPIES.get(address.partition("://")[0], "{} to {}").format(
            shlex.quote(address), shlex.quote(copy)
        )
    return copying(shlex.quote(address)).replace("LOCAL_FOLDER/", f"{shlex.quote(copy)}/")


def copying(address: str) -> str:
    """Returns the command that copies an address to this machine, or says where to if none is known."""
    return _COPIES.get(address.partition("://")[0].lower(), "to a local folder").format(address)


def checked_key(key: str, place: str) -> list[str]:
    """Returns the parts of a relative key.

    Raises:
        RefusedError: It is absolute, empty, a URL, or leads out of its folder.
    """
    parts = key.split("/")
    if "\0" in key or any(p in ("", ".", "..") for p in parts) or len(key) > 4096 or "\\" in key:
        raise RefusedError(
            "A checkpoint names a file outside its own folder.",
            place=place,
            expected="a relative path below the checkpoint",
            found=repr(key[:200]),
            remedy="don't use this checkpoint unless you know who made it",
        )
    return parts
