"""A work in a folder that all workers see: each attempt writes a folder of its own, and `finish` links the files."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statekit.errors import CommitError, TargetExistsError
from statekit.files.durable import new_file, rename_new, sync_folder, writing
from statekit.files.homes import Entries, Home, LocalHome, local_home
from statekit.files.source import read_small, walked
from statekit.files.tree import Place
from statekit.scale.parts import PARTS, PartFile, PartRecord
from statekit.scale.site import ATTEMPTS, BROUGHT, DOCUMENT, FINISHED, Site, check_files, left_behind

_PRIVATE = 0o700
_WRITTEN = re.compile(r"\d{5,}(-[0-9a-f]{32})?(\.[a-z]+)?")
"""Names of part records and attempts, and of the files that attempts write beside these."""
_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK}
"""What a file system answers that has no hard links, or has them within another part of it only."""


@dataclass(frozen=True)
class DiskSite:
    """A work in a folder that all workers see.

    Attributes:
        place: The folder.
        target: The target, on the same file system.
    """

    place: Path
    target: Place

    def now(self) -> Site:
        return self

    def exists(self, name: str) -> bool:
        return (self.place / name).exists()

    def read(self, name: str) -> bytes:
        return read_small(self.place / name)

    def create(self, name: str, data: bytes) -> bool:
        draft = self._draft("draft")
        with new_file(draft) as output:
            output.write(data)
        with writing(self.place):
            try:
                rename_new(draft, self.place / name)
            except FileExistsError:
                draft.unlink()
                return False
            sync_folder((self.place / name).parent)
        return True

    def replace(self, name: str, data: bytes) -> None:
        draft = self._draft("note")
        draft.write_bytes(data)
        os.replace(draft, self.place / name)

    def remove(self, name: str) -> None:
        (self.place / name).unlink(missing_ok=True)

    def set_aside(self, name: str) -> None:
        os.replace(self.place / name, self._draft("untrusted"))

    def names(self, folder: str) -> list[str]:
        return sorted(path.name for path in (self.place / folder).glob("*.json"))

    def begin(self, entries: Sequence[str]) -> None:
        folder = self.place
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise TargetExistsError(
                "The work's folder exists, and no work is in it.", place=folder, remedy="name another folder"
            )
        folder.mkdir(mode=_PRIVATE, exist_ok=True)
        # Attempts hold the source's values, whoever may enter an empty folder that was there.
        if stat.S_IMODE(folder.stat().st_mode) != _PRIVATE:
            folder.chmod(_PRIVATE)
        for name in (PARTS, ATTEMPTS):
            (folder / name).mkdir(exist_ok=True)

    def hold(self, entries: Sequence[str]) -> None:
        """Does nothing: the target has no name before the work is finished."""

    @contextmanager
    def attempted(self, attempt: str, size: int) -> Iterator[Home]:
        folder = self.files_of(attempt)
        with writing(folder):
            folder.mkdir(parents=True)
        yield LocalHome(folder, Path(self.target), "folder")

    def proven(self, home: Home, files: Entries) -> dict[str, dict[str, Any]]:
        folder = Path(home.path)
        for below, _, _ in walked(folder.parent, bottom_up=True):
            sync_folder(Path(below))
        return {
            name: {**entry, "changed": (folder / name).stat().st_mtime_ns} for name, entry in files.items()
        }

    def discard(self, attempt: str) -> None:
        shutil.rmtree(self.place / ATTEMPTS / attempt, ignore_errors=True)

    def is_over(self) -> bool:
        # An attempt that goes on after the work was finished makes its folder anew.
        return self.exists(FINISHED) or not (self.place / ATTEMPTS).is_dir()

    def file_fault(self, part: PartRecord, name: str, entry: PartFile) -> str:
        try:
            facts = (self.files_of(part.attempt) / name).stat()
        except OSError:
            return "isn't there"
        is_same = (facts.st_size, facts.st_mtime_ns) == (entry["bytes"], entry.get("changed"))
        return "" if is_same else "was changed since"

    @contextmanager
    def joined(self, parts: Sequence[PartRecord], mode: int) -> Iterator[Home]:
        with local_home(Path(self.target), "folder", False, False, mode, 0) as home:
            with writing(self.target):
                for part in parts:
                    self._link_files(part, Path(home.path))
            check_files(self, parts)
            yield home

    def settle(self, home: Home) -> None:
        """Does nothing: each process writes a target of its own, and the first takes the name."""

    def end(self) -> None:
        with writing(self.place):
            (self.place / FINISHED).touch()
        shutil.rmtree(self.place / ATTEMPTS, ignore_errors=True)

    def drop(self) -> None:
        with writing(self.place):
            for name in (DOCUMENT, FINISHED, BROUGHT):  # without the first, nobody begins a task any more
                self.remove(name)
            for name in (PARTS, ATTEMPTS):
                _remove_written(self.place / name)
            try:
                self.place.rmdir()
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                raise left_behind(self.place, [path.name for path in self.place.iterdir()]) from None

    def files_of(self, attempt: str) -> Path:
        """Returns the folder of the files that an attempt writes; it is named as the target is."""
        return self.place / ATTEMPTS / attempt / self.target.name

    def _draft(self, suffix: str) -> Path:
        return self.place / ATTEMPTS / f"00000-{uuid.uuid4().hex}.{suffix}"

    def _link_files(self, part: PartRecord, folder: Path) -> None:
        """Puts the files of a task into the target; they stay where they are too, until the target has its name."""
        for name in part.files:
            path, place = self.files_of(part.attempt) / name, folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, place)
            except FileExistsError:
                raise CommitError("Two tasks wrote one file.", place=self.target, found=name) from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with path.open("rb") as source, new_file(place) as output:
                    shutil.copyfileobj(source, output, 2**23)


def _remove_written(folder: Path) -> None:
    """Removes what attempts wrote into a folder, and the folder if nothing else is in it."""
    for path in [*folder.iterdir()] if folder.is_dir() and not folder.is_symlink() else ():
        if _WRITTEN.fullmatch(path.name):
            path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
    with suppress(OSError):  # it is gone, or it holds somebody else's files
        folder.rmdir()
