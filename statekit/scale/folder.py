"""The folder of a work, which all that carry it out see.

    work.json                    what was asked for, and what a worker's own plan must agree with
    brought                      what the split read of a source in a store, so that no worker asks for it again
    parts/00017.json             a part record: task 17 is done; created if absent, never changed
    attempts/00017-<uuid>/       what an attempt at task 17 writes; the part record names the attempt that counts
    attempts/00017-<uuid>.json   how far that attempt is, or why it failed
    finished                     the target has its name; no attempt counts any more

A worker makes the plan anew from what was asked for, and trusts the document for nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict

from statekit.budget import collecting_rarely
from statekit.conversion.convert import copied_names, damage_at_opening, other_tensors
from statekit.conversion.plan import Plan
from statekit.conversion.prepared import Prepared, carried_out, prepare
from statekit.errors import CorruptError, Faults, NotFoundError, StatekitError, some
from statekit.files.file_changes import SMALL_BYTES
from statekit.files.integrity import check_no_damage
from statekit.files.sections import CutPoints, Section
from statekit.files.source import read_small
from statekit.files.tree import StoredPlace, spelled
from statekit.scale.brought import put_brought
from statekit.scale.fingerprint import check_fingerprint
from statekit.scale.parts import PartRecord, check_own_digest, read_part
from statekit.scale.request import RequestDocument, from_json
from statekit.scale.tasks import Task, tasks_of
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import strict_json
from statekit.tensors.typed import Name, Natural, typed

FORMAT = "statekit-work"
VERSION = 1
DOCUMENT, BROUGHT, PARTS, ATTEMPTS, FINISHED = "work.json", "brought", "parts", "attempts", "finished"
_BROKEN = "This isn't the document of a work, or it was changed"


class WorkDocument(TypedDict):
    """The fields of `work.json`."""

    format: str
    version: Natural
    request: RequestDocument
    plan: str
    task_bytes: Natural
    source: dict[Name, list[Natural | str]]
    fingerprint: dict[Name, str]
    tasks: list[tuple[str, Natural, Natural]]
    digest: str


@dataclass(frozen=True)
class Opened:
    """What a worker made of a work's document: the plan, the source, open, and the tasks.

    Attributes:
        plan: The plan.
        prepared: What it was made from.
        sections: The target's, by name.
        rest: Tensors of the source that aren't written as they are.
        passed: Name in the target -> name in the source, of tensors that are written as they are.
        tasks: The tasks.
    """

    plan: Plan
    prepared: Prepared
    sections: Mapping[str, Section]
    rest: Mapping[str, Tensor]
    passed: Mapping[str, str]
    tasks: tuple[Task, ...]


class WorkFolder:
    """A work's folder, and what a worker makes of its document. Leaving its context closes the source.

    Args:
        place: The work's folder.
        opened: What the document was made from, where this process split the work.

    Raises:
        NotFoundError: There is no work.
        FormatError, CorruptError: Its document can't be trusted.
    """

    def __init__(self, place: str | os.PathLike[str], opened: Opened | None = None) -> None:
        self.place = Path(os.path.abspath(place))
        self.document = read_document(self.place)
        self._stack = ExitStack()
        if opened is not None:
            self._stack.enter_context(opened.prepared)
            self.__dict__["opened"] = opened

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.place}: {len(self.document['tasks'])} tasks>"

    def close(self) -> None:
        """Closes the source."""
        self._stack.close()

    @property
    def digest(self) -> str:
        """The digest of the work's document: it covers plan, cut, source and fingerprint."""
        return self.document["digest"]

    @property
    def target(self) -> Path:
        """Where the result shall be."""
        return Path(self.document["request"]["target"])

    @cached_property
    @collecting_rarely()
    def opened(self) -> Opened:
        """The plan and its source, made anew from what was asked for.

        Raises:
            UsageError: The libraries here have other versions.
            CorruptError: The source isn't what it was when the work was split.
        """
        check_fingerprint(self.document["fingerprint"], self.place)
        request = from_json(self.document["request"])
        put_brought(request.ref.place, self.place / BROUGHT)
        plan = prepare(request)
        prepared = self._stack.enter_context(carried_out(plan))
        if changed := _changed(self.document["source"], facts_of(prepared)):
            raise CorruptError(
                "The source was changed after the work was split.",
                place=request.ref.place,
                found=some(changed),
                remedy="drop the work (statekit work drop) and split it again",
            )
        opened = opened_of(plan, prepared, self.document["task_bytes"])
        tasks: list[Any] = [task.to_json() for task in opened.tasks]
        if (plan.digest, tasks) != (self.document["plan"], self.document["tasks"]):
            raise CorruptError(
                "The plan made here isn't the plan of the work.",
                place=self.place / DOCUMENT,
                expected=f"plan {self.document['plan']}, {len(self.document['tasks'])} tasks",
                found=f"plan {plan.digest}, {len(tasks)} tasks",
                remedy="drop the work (statekit work drop) and split it again",
            )
        return opened

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks, in their order."""
        return self.opened.tasks

    def part(self, number: int) -> PartRecord | None:
        """Returns the record of a task that is done; None where it is missing, or can't be trusted."""
        try:
            return self.proven_part(number)
        except StatekitError:
            return None

    def stated_part(self, number: int) -> PartRecord:
        """Returns the record of a task that is done, wherever its files are by now.

        Raises:
            NotFoundError: There is none.
            FormatError, CorruptError: It isn't what was written, or is of another work.
        """
        part = read_part(self.part_place(number))
        if (part.work, part.task) != (self.digest, number):
            raise CorruptError(
                "A part record is of another work, or of another task.",
                place=self.part_place(number),
                expected=f"work {self.digest}, task {number}",
                found=f"work {part.work}, task {part.task}",
                remedy="run the task again",
            )
        return part

    def proven_part(self, number: int) -> PartRecord:
        """Returns the record of a task whose files are there, as they were when its attempt proved them.

        Raises:
            NotFoundError: There is none.
            FormatError, CorruptError: It, or a file that it names, isn't what was written, or it is of another work.
        """
        part = self.stated_part(number)
        # The work is finished: its files have the target's names. An attempt that goes on makes its folder anew.
        if (self.place / FINISHED).exists() or not (self.place / ATTEMPTS).is_dir():
            return part
        faults = Faults(
            (fault, name)
            for name, entry in part.files.items()
            if (fault := _file_fault(self.files_of(part) / name, entry))
        )
        faults.check(
            CorruptError,
            f"The files of task {number} aren't what its attempt wrote",
            place=self.files_of(part),
            remedy="run the task again",
        )
        return part

    def part_place(self, number: int) -> Path:
        """Returns where a task's part record is."""
        return self.place / PARTS / f"{number:05}.json"

    def files_of(self, part: PartRecord) -> Path:
        """Returns the folder of the files that an attempt wrote; it is named as the target is."""
        return self.place / ATTEMPTS / part.attempt / self.target.name

    def missing(self) -> list[int]:
        """Returns the numbers of the tasks that aren't done."""
        return [number for number in range(len(self.document["tasks"])) if self.part(number) is None]


def opened_of(plan: Plan, prepared: Prepared, task_bytes: int) -> Opened:
    """Returns the tasks of a plan, and what they are made from; nothing is read.

    Raises:
        UsageError: The target is one file.
        CorruptError: The source contradicts its manifest.
    """
    container, checkpoint = prepared.cuttable(), prepared.opened.checkpoint
    check_no_damage(damage_at_opening(checkpoint), checkpoint.path)
    with prepared.joining():
        sections = container.image(prepared.encoded, plan.request.target, CutPoints(task_bytes))
    passed = copied_names(checkpoint, prepared.encoded.tree)
    rest, files = other_tensors(checkpoint, passed), _proven_files(prepared)
    tasks = tasks_of(sections, rest, files, task_bytes)
    return Opened(plan, prepared, {section.name: section for section in sections}, rest, passed, tasks)


def _proven_files(prepared: Prepared) -> dict[str, int]:
    """Returns the large files of the source that its manifest has the digests of, with their sizes."""
    proof = prepared.opened.checkpoint.proof
    if proof is None:
        return {}
    if proof.is_inside:
        facts = prepared.files.get(proof.place)
        return {f"{proof.place}": facts.size} if facts is not None and facts.size > SMALL_BYTES else {}
    sizes = {f"{path}": int(entry["bytes"]) for path, entry in proof.files.items()}
    return {name: size for name, size in sizes.items() if size > SMALL_BYTES}


def facts_of(prepared: Prepared) -> dict[str, list[int | str]]:
    """Returns what all machines see alike of the source's files: size, time of the last change, a store's identity."""
    return {
        spelled(place): [
            facts.size,
            facts.changed or 0,
            *([facts.identity] if isinstance(place, StoredPlace) else []),
        ]
        for place, facts in prepared.files.items()
    }


def _changed(then: Mapping[str, Sequence[object]], now: Mapping[str, Sequence[object]]) -> list[str]:
    return [name for name in {**then, **now} if then.get(name) != now.get(name)]


def _file_fault(path: Path, entry: Mapping[str, Any]) -> str:
    try:
        facts = path.stat()
    except OSError:
        return "isn't there"
    if (facts.st_size, facts.st_mtime_ns) != (entry["bytes"], entry["changed"]):
        return "was changed since"
    return ""


def read_document(folder: Path) -> WorkDocument:
    """Reads the document of a work.

    Raises:
        NotFoundError: There is none.
        FormatError: It is none.
        CorruptError: It was changed.
    """
    place = folder / DOCUMENT
    if not place.is_file():
        raise NotFoundError(
            "This folder holds no work.",
            place=folder,
            expected=DOCUMENT,
            remedy="statekit work split SRC DST",
        )
    document: Any = strict_json(read_small(place), place)
    fields = typed(document, WorkDocument, place, _BROKEN)
    remedy = "drop the work (statekit work drop) and split it again"
    check_own_digest(document, (FORMAT, VERSION), place, _BROKEN, remedy)
    return fields
