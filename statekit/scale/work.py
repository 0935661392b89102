"""A work: a conversion that many processes carry out, each of them a task at a time."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from statekit.conversion.convert import Report, check_place
from statekit.conversion.plan import Plan
from statekit.conversion.prepared import carried_out
from statekit.errors import CommitError, TargetExistsError, UsageError, some
from statekit.files.durable import new_file, rename_new, sync_folder, writing
from statekit.scale.brought import brought_of
from statekit.scale.fingerprint import fingerprint
from statekit.scale.finish import finish as finish_work
from statekit.scale.folder import (
    ATTEMPTS,
    BROUGHT,
    DOCUMENT,
    FINISHED,
    FORMAT,
    PARTS,
    VERSION,
    WorkFolder,
    facts_of,
    opened_of,
    read_document,
)
from statekit.scale.parts import PartRecord
from statekit.scale.progress import Status, status_of
from statekit.scale.request import to_json
from statekit.scale.running import run as run_task
from statekit.tensors.digest import json_digest

TASK_BYTES = 2 * 2**30
_PRIVATE = 0o700
_WRITTEN = re.compile(r"\d{5,}(-[0-9a-f]{32})?(\.[a-z]+)?")
"""Names of part records, of attempts, and of what they leave beside them."""


def split(plan: Plan, place: str | os.PathLike[str], task_bytes: int = TASK_BYTES) -> Work:
    """Splits a plan into tasks; the same plan and bytes give the same tasks.

    Args:
        plan: What to do; its target isn't there yet.
        place: The work's folder, which all workers see, on the target's file system. If it holds the same work
            already, that goes on.
        task_bytes: Bytes of a task's values, and of the values in a file of the target, at most; a larger tensor is a
            task by itself.

    Raises:
        UsageError: The target is one file, or its folder belongs to another work, or the options don't go together.
        TargetExistsError: The target exists.
        CorruptError: The source contradicts its manifest.

    Example:
        >>> import statekit
        >>> planned = statekit.plan("t5x-ckpt", "run.statekit")  # doctest: +SKIP
        >>> work = statekit.split(planned, "run.work", task_bytes=2**20)  # doctest: +SKIP
        >>> [part.task for part in map(work.run, work.missing())], work.missing()  # doctest: +SKIP
        ([0], [])
        >>> work.finish().verified  # doctest: +SKIP
        22
    """
    folder = Path(os.path.abspath(place))
    _check_asked(plan, folder, task_bytes)
    check_place(plan, replace=False, replace_foreign=False)
    prepared = carried_out(plan)
    try:
        opened = opened_of(plan, prepared, task_bytes)
        document = {
            "format": FORMAT,
            "version": VERSION,
            "request": to_json(plan.request),
            "plan": plan.digest,
            "task_bytes": task_bytes,
            "source": facts_of(prepared),
            "fingerprint": fingerprint(),
            "tasks": [task.to_json() for task in opened.tasks],
        }
        brought = brought_of(prepared.opened.checkpoint.path)
        _make(folder, {**document, "digest": json_digest(document)}, brought)
        return Work(folder, opened)
    except BaseException:
        prepared.close()
        raise


class Work(WorkFolder):
    """A conversion that many processes carry out. Leaving its context closes the source.

    Raises:
        NotFoundError: There is no work.
        FormatError, CorruptError: Its document can't be trusted.
    """

    def run(self, number: int) -> PartRecord:
        """Does a task, unless it is done; returns the part record that counts.

        Raises:
            UsageError: There is no such task, or the libraries here have other versions.
            CorruptError: The source was changed, or isn't what its manifest says, or another attempt differs.
            CommitError: Writing failed, or the written target differs from the data.
        """
        if not 0 <= number < len(self.document["tasks"]):
            raise UsageError(
                "There is no such task.",
                place=self.place,
                expected=f"0 to {len(self.document['tasks']) - 1}",
                found=number,
            )
        return self.part(number) or run_task(self, number)

    def status(self) -> Status:
        """Returns how far the work is, without opening the source."""
        return status_of(self)

    def finish(self, again: bool = False) -> Report:
        """Joins what the tasks wrote, proves it, and gives it the target's name; of a finished work, does nothing.

        Args:
            again: Whether to read all values of the target once more; the tasks have read them already.

        Raises:
            UsageError: Tasks are missing; lists them, and why.
            TargetExistsError: Something else is at the target.
            CorruptError: The source was changed, or isn't what its manifest says.
            CommitError: The target cannot be written, or differs from the data.
        """
        return finish_work(self, again)

    def drop(self) -> None:
        """Removes the work's folder, whatever in it is done; a finished target stays, and so do others' files.

        Raises:
            CommitError: It can't be removed, or somebody put other files there.
        """
        self.close()
        with writing(self.place):
            (self.place / DOCUMENT).unlink(missing_ok=True)  # nobody begins a task any more
            for name in (FINISHED, BROUGHT):
                (self.place / name).unlink(missing_ok=True)
            for name in (PARTS, ATTEMPTS):
                _remove_written(self.place / name)
            for draft in self.place.glob(f"{DOCUMENT}.*"):
                draft.unlink()
            try:
                self.place.rmdir()
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                raise CommitError(
                    "The work is gone, and its folder stays: somebody put other files there.",
                    place=self.place,
                    found=some(sorted(path.name for path in self.place.iterdir())),
                    remedy="look at them, and remove the folder yourself",
                ) from None


def _remove_written(folder: Path) -> None:
    """Removes what attempts wrote into a folder, and the folder if nothing else is in it."""
    for path in [*folder.iterdir()] if folder.is_dir() and not folder.is_symlink() else ():
        if _WRITTEN.fullmatch(path.name):
            path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
    with suppress(OSError):  # it isn't there, or what somebody else put there stays
        folder.rmdir()


def _check_asked(plan: Plan, folder: Path, task_bytes: int) -> None:
    """Refuses what no work can do."""
    if not isinstance(plan.request.target, Path):
        raise UsageError(
            "Many workers write targets on a disk that all of them see.",
            place=plan.request.target,
            remedy="name a folder there and copy it, or convert in one process: statekit convert without --on",
        )
    target = Path(os.path.abspath(plan.request.target))
    if type(task_bytes) is not int or task_bytes < 1:
        raise UsageError(
            "The size of a task must be a positive number of bytes.",
            place="task_bytes",
            expected="bytes, from 1 on",
            found=task_bytes,
        )
    if plan.request.ref.accept_damaged:
        raise UsageError(
            "A damaged source isn't converted by many workers.",
            place="--accept-damaged",
            remedy="convert it in one process: leave --on out",
        )
    if target == folder or target in folder.parents or folder in target.parents:
        raise UsageError(
            "The work's folder and the target lie in each other.",
            place=folder,
            found=f"target {target}",
            remedy="name a folder beside the target",
        )


def _make(folder: Path, document: Mapping[str, Any], brought: bytes) -> None:
    """Makes the folder of a work; one of the same work stays as it is."""
    text = json.dumps(document, allow_nan=False).encode("ascii")
    with writing(folder):
        if (folder / DOCUMENT).exists():
            if read_document(folder)["digest"] != document["digest"]:
                raise UsageError(
                    "Another work is in this folder.",
                    place=folder,
                    expected=f"work {document['digest']}",
                    remedy="name another folder, or drop that work (statekit work drop)",
                )
            return
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
        draft = folder / f"{DOCUMENT}.{os.getpid()}"
        for name, data in (((BROUGHT, brought),) if brought else ()) + ((DOCUMENT, text),):
            with new_file(draft) as output:
                output.write(data)
            try:
                rename_new(draft, folder / name)
            except FileExistsError:  # another process split the same plan
                draft.unlink()
                if name == DOCUMENT:
                    _make(folder, document, brought)
        sync_folder(folder)
