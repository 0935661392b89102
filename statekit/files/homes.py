"""Where the bytes of a target lie until it is complete: on this machine, a file or folder beside it.

A `Stage` digests, proves and describes a target; its home makes the files and gives the whole its name. A target in a
store has another home, `statekit.files.store_home`.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeAlias

from statekit.errors import CommitError, NotFoundError, StatekitError, TargetExistsError, UsageError, some
from statekit.files.durable import (
    beside,
    exchange,
    new_file,
    rename_new,
    rename_over_empty,
    set_mode,
    sweep,
    sync_folder,
    writing,
)
from statekit.files.file_changes import SMALL_BYTES, Change, file_faults
from statekit.files.manifest import (
    FILE,
    SEALED,
    Around,
    FindChecked,
    Unfinished,
    files_below,
    is_manifest,
    parse,
    unfinished,
    unnamed_files,
)
from statekit.files.source import Files, read_small, walked
from statekit.files.tree import Place

TargetKind: TypeAlias = Literal["file", "folder"]
Entries: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Name -> entry, as a manifest has them for its tensors and files."""
Facts: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""Of each file and folder: its name and mode; of a file its size and time of change in nanoseconds, too."""
Encode: TypeAlias = Callable[[Mapping[str, Any]], bytes]
"""Gives a manifest's bytes as they stand in a file."""


class Home(Protocol):
    """Where a target is written."""

    @property
    def target(self) -> Place:
        """The final place."""

    @property
    def kind(self) -> TargetKind:
        """What is written."""

    @property
    def path(self) -> Place:
        """What was written so far, as it is opened again; its last part is the target's."""

    @property
    def scratch(self) -> Path:
        """A folder of this machine for what is written only for a while."""

    @property
    def attempt(self) -> str:
        """What ends the names of files that no other attempt may write: `-` and an identifier; "" if none may meet."""

    def file(
        self, name: str, synced: bool, taken: Callable[[int, memoryview], object] | None, seeks: bool
    ) -> AbstractContextManager[BinaryIO]:
        """Opens a new file; the arguments are those of `Stage.file`, and what is given all bytes and their places."""

    def folder(self, name: str) -> AbstractContextManager[Path]:
        """Gives a new folder of this machine, for a library that makes files itself; they are the target's, then."""

    def names(self) -> list[str]:
        """Returns the names of all files written so far, sorted."""

    def hold(self) -> None:
        """Is told that what is written from now on depends on the whole file's digest."""

    def complete(
        self, manifest: Mapping[str, Any], encode: Encode, checked: FindChecked, around: Around
    ) -> tuple[dict[str, Any] | None, Unfinished | None]:
        """Fills the whole file's digest into it: returns it, or what will do so once the file has been read again."""

    def write_manifest(self, data: bytes) -> None:
        """Writes the manifest of a folder, in place of an earlier one."""

    def publish(self, files: Entries) -> None:
        """Gives the target its name.

        Args:
            files: Size and digest of each file as it was read again.

        Raises:
            CommitError: It can't.
            TargetExistsError: The target came into being meanwhile.
        """


@dataclass
class LocalHome:
    """A file or folder beside the target, which takes its name in one step.

    Attributes:
        path: The file (kind `file`, not there yet) or existing empty folder (kind `folder`) to write.
        target: The final path.
        kind: What is written.
        replace: Whether what is there may be replaced.
        foreign: Whether that may be anything of anybody's; else it must be what was there at the beginning.
        mode: Permissions that its files may have at most.
        seen: What was there at the beginning, as `_facts_of` gives it.
        attempt: As of `Home`: an attempt on a disk has a folder to itself.
    """

    _path: Path
    _target: Path
    kind: TargetKind
    replace: bool = False
    foreign: bool = False
    mode: int = 0o666
    seen: Facts = ()
    attempt: str = ""

    @property
    def path(self) -> Place:
        return self._path

    @property
    def target(self) -> Place:
        return self._target

    @property
    def scratch(self) -> Path:
        return self._path.parent

    def file(
        self, name: str, synced: bool, taken: Callable[[int, memoryview], object] | None, seeks: bool
    ) -> AbstractContextManager[BinaryIO]:
        return new_file(self._path / name if name else self._path, synced, taken)

    @contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        folder = self._path / name
        with writing(folder):
            folder.mkdir(parents=True)
        yield folder

    def names(self) -> list[str]:
        return files_below(self._path) if self.kind == "folder" else [self._path.name]

    def hold(self) -> None:
        """Does nothing: a file on a disk is written to once more."""

    def complete(
        self, manifest: Mapping[str, Any], encode: Encode, checked: FindChecked, around: Around
    ) -> tuple[dict[str, Any] | None, Unfinished | None]:
        waiting = unfinished(self._path, manifest, encode, checked, around)
        if self._path.stat().st_size > SMALL_BYTES:
            return None, waiting
        return waiting.finish(waiting.passing()), None  # opening digests so small a file

    def write_manifest(self, data: bytes) -> None:
        place = self._path / FILE
        place.unlink(missing_ok=True)
        with new_file(place) as output:
            output.write(data)

    def publish(self, files: Entries) -> None:
        if self.kind == "folder":
            for folder, _, _ in walked(self._path, bottom_up=True):
                sync_folder(Path(folder))
        self._narrow()
        self._take_name()

    def _narrow(self) -> None:
        """Takes from what was written the permissions that the source, or what is replaced, doesn't give."""
        old = self._target if self.replace and os.path.exists(self._target) else None
        limit = self.mode & (permissions(all_of(old)) if old is not None else 0o666)
        for path in all_of(self._path):
            allowed = with_search(limit) if path.is_dir() else limit
            set_mode(path, stat.S_IMODE(path.stat().st_mode) & allowed)

    def _take_name(self) -> None:
        was_empty = self.kind == "folder" and _is_empty_folder(self._target)
        replaced = self.replace and not was_empty and os.path.lexists(self._target)
        mode = 0
        if replaced:
            old = exchange(self._path, self._target)
            self._check_seen(old)
        else:
            try:
                if was_empty:
                    mode = stat.S_IMODE(self._target.stat().st_mode)
                    set_mode(self._path, mode & with_search(self.mode))
                    rename_over_empty(self._path, self._target)
                else:
                    rename_new(self._path, self._target)
            except FileExistsError:
                raise _exists(self._target) from None
        try:
            sync_folder(self._target.parent)
        except OSError:  # not durable, so not done: the name goes back to what had it
            if replaced:
                _remove(exchange(old, self._target))
            else:
                rename_new(self._target, self._path)
            if was_empty:
                self._target.mkdir()
                set_mode(self._target, mode)
            raise
        if replaced:
            _remove(old)

    def _check_seen(self, old: Path) -> None:
        """Gives the name back to what had it, if that isn't what was looked at: a conversion takes hours."""
        try:
            _check_kind(old)
            if self.foreign or _facts_of(old) == self.seen:
                return
        except TargetExistsError:
            pass
        _remove(exchange(old, self._target))
        raise TargetExistsError(
            "The target was changed while the conversion ran: what lies there now stays.",
            place=self._target,
            remedy="look at it, and convert again; or choose another name",
        )


@contextmanager
def local_home(
    target: Path, kind: TargetKind, replace: bool, foreign: bool, mode: int, total: int
) -> Iterator[LocalHome]:
    """Gives the home of a target on this machine, which is gone at the end; arguments and errors as in `staged`."""
    target = Path(os.path.abspath(target))
    # Before it is checked: what is checked is what was seen, or younger.
    seen = _facts_of(target) if replace else ()
    check_target(target, kind, replace=replace, foreign=foreign)
    sweep(target.parent)
    check_space(target, target.parent, total)
    with beside(target) as temporary:
        path = temporary / target.name
        if kind == "folder":
            with writing(target):
                path.mkdir()  # ordinary permissions: the folder around it lets nobody in until the rename
        yield LocalHome(path, target, kind, replace, foreign, mode, seen)


def check_name(target: Place) -> None:
    """Refuses names of temporary files, and of manifests: what lies beside would take the target for its own.

    Raises:
        UsageError: It is one.
    """
    if target.name.startswith(".statekit-") or not target.name or is_manifest(target.name):
        raise UsageError(
            "A target can't have this name.",
            place=target,
            expected="another than .statekit-*, statekit.json and statekit.*.json",
        )


def check_target(target: Path, kind: TargetKind, *, replace: bool, foreign: bool = False) -> None:
    """Refuses a target that can't be written, before any work. Raises as `staged` does."""
    check_name(target)
    if not target.parent.is_dir():
        raise NotFoundError(
            "The target's folder isn't there.", place=target.parent, remedy=f"mkdir -p {target.parent}"
        )
    if kind == "folder" and _is_empty_folder(target):
        return
    if os.path.lexists(target):
        if not replace:
            raise _exists(target)
        _check_kind(target)
        if not foreign:
            _check_ours(target)


def check_space(target: Place, folder: Path, total: int) -> None:
    """Refuses a target for which a folder's disk lacks space.

    Raises:
        CommitError: It does.
    """
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and free < total:  # some network file systems report nothing at all
        raise CommitError(
            "The target's disk lacks space.",
            place=target,
            expected=f"{total} bytes free",
            found=f"{free} bytes free",
            remedy="free some space, or choose a target on another disk",
        )


def _check_ours(target: Path) -> None:
    """Refuses to replace a folder with files that statekit didn't write, or that changed since.

    `convert` looks into files: it knows the containers that keep a manifest inside.
    """
    if target.is_symlink() or not target.is_dir() or not files_below(target):
        return
    try:
        manifest = parse(read_small(target / FILE), target / FILE)
        foreign = [*unnamed_files(target, manifest), *manifest.get(SEALED, ()), *_changed(target, manifest)]
    except StatekitError:
        foreign = files_below(target)
    if foreign:
        raise TargetExistsError(
            "The target is a folder with files that statekit didn't write, or that were changed since; "
            "replacing it would delete them.",
            place=target,
            found=some(foreign),
            remedy="choose another name, or move the folder away; --replace-foreign deletes them",
        )


def _facts_of(target: Path) -> Facts:
    """Returns what tells a file, or all that lies in a folder, from another or from itself when it is changed."""
    facts = []
    for path in (target,) if target.is_symlink() else all_of(target):
        with suppress(OSError):  # nothing is there, or it went meanwhile
            entry = path.lstat()
            # Folders are told by what lies in them. Inodes don't tell: file systems without their own make them up.
            size, changed = (0, 0) if stat.S_ISDIR(entry.st_mode) else (entry.st_size, entry.st_mtime_ns)
            facts.append((path.relative_to(target).as_posix(), entry.st_mode, size, changed))
    return tuple(sorted(facts))


def _changed(target: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Returns the files of a folder that are there and aren't what its manifest says, by size and small digests."""
    entries = {target / name: entry for name, entry in manifest["files"].items()}
    with Files() as files:
        faults = file_faults(entries, target / FILE, files)
    return [fault.path.relative_to(target).as_posix() for fault in faults if fault.change is not Change.LOST]


def _check_kind(target: Path) -> None:
    """Refuses to put a checkpoint in the place of a device, a FIFO or a socket."""
    mode = target.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        raise TargetExistsError(
            "The target is neither a file nor a folder.",
            place=target,
            found=stat.filemode(mode),
            remedy="choose another name",
        )


def permissions(paths: Iterable[Place]) -> int:
    """Returns what all of some files and folders let read and write: what their conversion may let at most.

    A folder that only its owner may read counts as its files: what lies in it is for nobody else.
    """
    limit = 0o666
    for path in paths:
        if not isinstance(path, Path):  # a store has none
            continue
        with suppress(OSError):  # a link that leads nowhere
            limit &= stat.S_IMODE(path.stat().st_mode)
    return limit


def all_of(path: Path) -> Iterator[Path]:
    """Yields a file, or a folder with all that lies in it."""
    yield path
    if path.is_dir():
        for top, folders, files in walked(path):
            yield from (Path(top, name) for name in (*folders, *files))


def with_search(mode: int) -> int:
    """Returns the permissions of a folder whose files have these: who may read may enter."""
    return mode | (mode & 0o444) >> 2


def _is_empty_folder(path: Path) -> bool:
    """Tells whether a path is a folder itself, no link to one, with nothing in it; not of one that can't be read."""
    try:
        return not path.is_symlink() and path.is_dir() and not any(path.iterdir())
    except OSError:
        return False


def _remove(path: Path) -> None:
    """Removes a file, a link or a folder as far as it may; the target is done, so this can't fail any more."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _exists(target: Path) -> TargetExistsError:
    return TargetExistsError(
        "The target exists.", place=target, remedy="choose another name, or pass --replace"
    )
