"""How far a work is: what part records and the notes of attempts say; no source is opened."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from statekit.errors import StatekitError
from statekit.files.durable import writing
from statekit.files.stage import Progress
from statekit.scale.folder import WorkFolder
from statekit.scale.parts import PartRecord
from statekit.scale.site import ATTEMPTS, FINISHED, Site
from statekit.tensors.tree import strict_json
from statekit.tensors.typed import Name, Natural, typed

_BETWEEN = 2.0
"""Seconds between two notes of an attempt."""
SILENT = 60.0
"""Seconds without a note after which an attempt counts as given up."""


class NoteDocument(TypedDict):
    """The note of an attempt."""

    task: Natural
    host: str
    pid: Natural
    began: float
    at: float
    phase: str
    done: Natural
    bytes: Natural
    error: NotRequired[Name]


@dataclass
class Attempt:
    """An attempt at a task, and the note that it leaves beside its folder."""

    site: Site
    name: str
    _note: dict[str, Any]
    _noted: float = 0.0

    @classmethod
    def begin(cls, site: Site, task: int, name: str, size: int) -> Attempt:
        """Makes the first note.

        Args:
            site: Where the work lies.
            task: The task's number.
            name: The attempt's.
            size: Bytes of the task.
        """
        now = time.time()
        note = {"task": task, "host": socket.gethostname(), "pid": os.getpid(), "began": now, "at": now}
        attempt = cls(site, name, {**note, "phase": "", "done": 0, "bytes": size})
        with writing(site.place):
            attempt._write()
        return attempt

    def tell(self, progress: Progress) -> None:
        """Notes how far it is, now and then."""
        if time.monotonic() - self._noted >= _BETWEEN:
            self._note |= {"phase": progress.phase, "done": progress.done}
            self._write()

    def failed(self, error: BaseException) -> None:
        """Notes why it failed."""
        line = error.line if isinstance(error, StatekitError) else f"{type(error).__name__}: {error}"
        self._note["error"] = line
        with suppress(OSError, StatekitError):
            self._write()

    def end(self) -> None:
        """Removes the note: the part record says all."""
        self.site.remove(self._name_of_note)

    def _write(self) -> None:
        self._noted, self._note["at"] = time.monotonic(), time.time()
        self.site.replace(self._name_of_note, json.dumps(self._note).encode("ascii"))

    @property
    def _name_of_note(self) -> str:
        return f"{ATTEMPTS}/{self.name}.json"


@dataclass(frozen=True)
class Running:
    """A running attempt: its task, host, progress and duration."""

    task: int
    host: str
    pid: int
    phase: str
    done: int
    bytes: int
    seconds: float
    silent: float


@dataclass(frozen=True)
class Status:
    """How far a work is.

    Attributes:
        tasks: How many tasks there are.
        bytes: Bytes of all tasks.
        done: The numbers of those that are done.
        done_bytes: Their bytes.
        running: Attempts under way, the slowest first.
        silent: Attempts of which nothing was heard for a minute.
        failed: The last error of each task that failed and isn't done.
        attempts: How many attempts failed, or were given up.
        seconds: Seconds of the tasks that are done, together.
        finished: Whether the target has its name.
    """

    tasks: int
    bytes: int
    done: tuple[int, ...]
    done_bytes: int
    running: tuple[Running, ...] = ()
    silent: tuple[Running, ...] = ()
    failed: dict[int, str] = field(default_factory=dict)
    attempts: int = 0
    seconds: float = 0.0
    finished: bool = False

    @property
    def missing(self) -> list[int]:
        """The numbers of the tasks that aren't done."""
        done = set(self.done)
        return [number for number in range(self.tasks) if number not in done]

    @property
    def moved(self) -> int:
        """Bytes done, of tasks under way too: each byte is written, and then read again."""
        under_way = {attempt.task: _share(attempt) for attempt in reversed(self.running)}
        return self.done_bytes + sum(under_way.values())

    def to_json(self) -> dict[str, Any]:
        """Returns the status as plain JSON."""
        return {
            "tasks": self.tasks,
            "bytes": self.bytes,
            "done": list(self.done),
            "done_bytes": self.done_bytes,
            "missing": self.missing,
            "running": [vars(attempt) for attempt in self.running],
            "silent": [vars(attempt) for attempt in self.silent],
            "failed": {str(task): error for task, error in self.failed.items()},
            "attempts_lost": self.attempts,
            "seconds": round(self.seconds, 3),
            "finished": self.finished,
        }


def status_of(work: WorkFolder) -> Status:
    """Returns how far a work is."""
    sizes = [int(task[1]) for task in work.document["tasks"]]
    parts = {number: part for number, part in enumerate(work.parts()) if isinstance(part, PartRecord)}
    running, silent, errors = _attempts(work.site, parts)
    return Status(
        len(sizes),
        sum(sizes),
        tuple(parts),
        sum(sizes[number] for number in parts),
        running,
        silent,
        {note["task"]: note["error"] for note in sorted(errors, key=lambda note: note["at"])},
        len(errors) + len(silent),
        sum(part.seconds for part in parts.values()),
        work.site.exists(FINISHED),
    )


def _attempts(
    site: Site, done: Container[int]
) -> tuple[tuple[Running, ...], tuple[Running, ...], list[NoteDocument]]:
    """Returns the running, the silent and the failed attempts at unfinished tasks."""
    notes = [note for note in _notes(site) if note["task"] not in done]
    alive = sorted(
        map(_running, (note for note in notes if "error" not in note)), key=lambda attempt: -attempt.seconds
    )
    running = tuple(attempt for attempt in alive if attempt.silent < SILENT)
    silent = tuple(attempt for attempt in alive if attempt.silent >= SILENT)
    return running, silent, [note for note in notes if "error" in note]


def _notes(site: Site) -> Iterator[NoteDocument]:
    for name in site.names(ATTEMPTS):
        place = site.place / name
        try:
            yield typed(strict_json(site.read(f"{ATTEMPTS}/{name}"), place), NoteDocument, place)
        except StatekitError:  # it has just ended
            continue


def _running(note: NoteDocument) -> Running:
    now = time.time()
    return Running(
        note["task"],
        note["host"],
        note["pid"],
        note["phase"],
        note["done"],
        note["bytes"],
        max(0.0, now - note["began"]),
        max(0.0, now - note["at"]),
    )


def _share(attempt: Running) -> int:
    half = min(attempt.done, attempt.bytes) // 2
    return half + attempt.bytes // 2 if attempt.phase == "verify" else half
