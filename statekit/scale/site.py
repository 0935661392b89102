"""Where a work lies, and its attempts write: a folder that all workers see, or a store.

    work.json                    what was asked for, and what a worker's own plan must agree with
    brought                      what the split read of a source in a store, so that no worker asks for it again
    parts/00017.json             a part record: task 17 is done; created if absent, never changed
    attempts/00017-<uuid>/       what an attempt at task 17 writes; the part record names the attempt that counts
    attempts/00017-<uuid>.json   how far that attempt is, or why it failed
    joined                       in a store: what joins the tasks' files; the first finish to create it decides
    finished                     the target has its name; no attempt counts any more

In a store an attempt writes its files under their final names, which no reader takes for a checkpoint before the work
is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from statekit.errors import CommitError, Faults, some
from statekit.files.homes import Entries, Home
from statekit.files.tree import Place
from statekit.scale.parts import PartFile, PartRecord

DOCUMENT, BROUGHT, ATTEMPTS, JOINED, FINISHED = "work.json", "brought", "attempts", "joined", "finished"


class Site(Protocol):
    """Where a work lies; a record is named as below the work's folder, such as `parts/00017.json`."""

    @property
    def place(self) -> Place:
        """The work's folder."""

    def now(self) -> Site:
        """Returns the site as it is at this moment; in a store one listing answers what is asked of it."""

    def exists(self, name: str) -> bool:
        """Tells whether there is a record."""

    def read(self, name: str) -> bytes:
        """Returns a record.

        Raises:
            NotFoundError: There is none.
        """

    def create(self, name: str, data: bytes) -> bool:
        """Creates a record in one step; tells whether there was none."""

    def replace(self, name: str, data: bytes) -> None:
        """Writes a record over an earlier one."""

    def remove(self, name: str) -> None:
        """Removes a record, if there is one."""

    def set_aside(self, name: str) -> None:
        """Takes its name from a record that can't be trusted."""

    def names(self, folder: str) -> list[str]:
        """Returns the names of the records in a folder, sorted."""

    def begin(self, entries: Sequence[str]) -> None:
        """Makes room for a new work, and keeps other writers from its target, as `hold` does.

        Raises:
            TargetExistsError: Something else is there, or another process writes the target.
        """

    def hold(self, entries: Sequence[str]) -> None:
        """Keeps other writers from the target until the work is finished or dropped.

        Args:
            entries: The files by which the format's readers find the target.

        Raises:
            TargetExistsError: Another process writes the target.
        """

    def attempted(self, attempt: str, size: int) -> AbstractContextManager[Home]:
        """Gives an attempt the place for its files, of so many bytes of values together.

        Raises:
            CommitError: Another writer has taken over the target.
        """

    def proven(self, home: Home, files: Entries) -> dict[str, dict[str, Any]]:
        """Has what an attempt wrote survive a loss of power; adds to each file's entry what tells a later change."""

    def discard(self, attempt: str) -> None:
        """Removes what an attempt wrote, where no other one uses it."""

    def is_over(self) -> bool:
        """Whether the target has its name, and what attempts wrote doesn't count any more."""

    def file_fault(self, part: PartRecord, name: str, entry: PartFile) -> str:
        """Returns what is wrong with a file that an attempt wrote; "" if nothing is."""

    def joined(self, parts: Sequence[PartRecord], mode: int) -> AbstractContextManager[Home]:
        """Gives the home of the target, in which the files of all tasks lie already.

        Args:
            parts: What the tasks wrote.
            mode: Permissions that its files may have at most.
        """

    def settle(self, home: Home) -> None:
        """Has each process that finishes the work go on with the same files, whatever it has joined them by itself."""

    def end(self) -> None:
        """Notes that the target has its name, and lets readers see it."""

    def drop(self) -> None:
        """Removes the work, and what of it isn't finished.

        Raises:
            CommitError: It can't be removed, or somebody put other files there.
        """


def check_files(site: Site, parts: Sequence[PartRecord]) -> None:
    """Makes sure that what is joined now is what the tasks wrote, however long ago that was looked at."""
    Faults(
        (fault, name)
        for part in parts
        for name, entry in part.files.items()
        if (fault := site.file_fault(part, name, entry))
    ).check(
        CommitError, "Files of tasks were changed meanwhile", place=site.place, remedy="finish the work again"
    )


def left_behind(place: Place, names: Sequence[str]) -> CommitError:
    """Returns the error of a work whose folder holds somebody else's files."""
    return CommitError(
        "The work is gone, and its folder stays: somebody put other files there.",
        place=place,
        found=some(sorted(names)),
        remedy="look at them, and remove the folder yourself",
    )
