"""A work: a conversion that many processes carry out, each of them a task at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from statekit.conversion.convert import Report, check_place
from statekit.conversion.plan import Plan
from statekit.conversion.prepared import carried_out
from statekit.errors import UsageError
from statekit.files.durable import writing
from statekit.files.source import checkpoint_place
from statekit.files.tree import Place, StoredPlace, absolute
from statekit.scale.brought import brought_of
from statekit.scale.fingerprint import fingerprint
from statekit.scale.finish import finish as finish_work
from statekit.scale.folder import (
    FORMAT,
    VERSION,
    WorkFolder,
    facts_of,
    opened_of,
    read_document,
    site_of,
)
from statekit.scale.parts import PartRecord
from statekit.scale.progress import Status, status_of
from statekit.scale.request import to_json
from statekit.scale.running import run as run_task
from statekit.scale.site import BROUGHT, DOCUMENT, Site
from statekit.tensors.digest import json_digest

TASK_BYTES = 2 * 2**30


def split(plan: Plan, place: str | os.PathLike[str] | Place, task_bytes: int = TASK_BYTES) -> Work:
    """Splits a plan into tasks; the same plan and bytes give the same tasks.

    Args:
        plan: What to do; its target isn't there yet.
        place: The work's folder, which all workers see, on the target's file system or in its bucket. If it holds the
            same work already, that goes on.
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
    folder = absolute(checkpoint_place(place))
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
        digest = json_digest(document)
        site = site_of(folder, plan.request.target, digest)
        entries = getattr(prepared.container, "entries", ())
        _make(site, {**document, "digest": digest}, brought_of(prepared.opened.checkpoint.path), entries)
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
        self.site.drop()


def _check_asked(plan: Plan, folder: Place, task_bytes: int) -> None:
    """Refuses what no work can do."""
    target = absolute(plan.request.target)
    if _bucket(target) != _bucket(folder):
        raise UsageError(
            "The work's folder and the target lie in different places.",
            place=folder,
            expected=f"a folder in {_bucket(target) or 'the file system of the target'}",
            remedy="leave --work out: the work lies beside the target",
        )
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


def _bucket(place: Place) -> str:
    """Returns the bucket that a place lies in; "" on this machine."""
    return "/".join(f"{place}".split("/")[:3]) if isinstance(place, StoredPlace) else ""


def _make(site: Site, document: Mapping[str, Any], brought: bytes, entries: Sequence[str]) -> None:
    """Makes the folder of a work; one of the same work stays as it is."""
    text = json.dumps(document, allow_nan=False).encode("ascii")
    with writing(site.place):
        if not site.exists(DOCUMENT):
            site.begin(entries)
            if brought:
                site.create(BROUGHT, brought)
            if site.create(DOCUMENT, text):
                return
        # It was there, or another process split the same plan.
        if read_document(site.place)["digest"] != document["digest"]:
            raise UsageError(
                "Another work is in this folder.",
                place=site.place,
                expected=f"work {document['digest']}",
                remedy="name another folder, or drop that work (statekit work drop)",
            )
        site.hold(entries)
