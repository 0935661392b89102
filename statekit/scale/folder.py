"""The document of a work and its part records, which all that carry it out see.

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
from statekit.files.source import checkpoint_place
from statekit.files.tree import Place, StoredPlace, spelled
from statekit.pipeline import in_turn
from statekit.scale.brought import put_brought
from statekit.scale.disk_site import DiskSite
from statekit.scale.fingerprint import check_fingerprint
from statekit.scale.parts import PartRecord, check_own_digest, part_name, read_part
from statekit.scale.request import RequestDocument, from_json
from statekit.scale.site import BROUGHT, DOCUMENT, Site
from statekit.scale.tasks import Task, tasks_of
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import strict_json
from statekit.tensors.typed import Name, Natural, typed

FORMAT = "statekit-work"
VERSION = 1
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

    def __init__(self, place: str | os.PathLike[str] | Place, opened: Opened | None = None) -> None:
        self.document = read_document(place)
        self.site = site_of(place, self.target, self.digest)
        self.place = self.site.place
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
    def target(self) -> Place:
        """Where the result shall be; in a store, as it is now."""
        return checkpoint_place(self.document["request"]["target"])

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
        if self.site.exists(BROUGHT):
            put_brought(request.ref.place, self.site.read(BROUGHT), self.place / BROUGHT)
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
            return self.proven_part(number, self.site)
        except StatekitError:
            return None

    def parts(self) -> list[PartRecord | StatekitError]:
        """Returns the record of each task, or why it isn't done."""
        site = self.site.now()

        def proven(number: int) -> PartRecord | StatekitError:
            try:
                return self.proven_part(number, site)
            except StatekitError as error:
                return error

        return [*in_turn(proven, range(len(self.document["tasks"])))]

    def proven_part(self, number: int, site: Site) -> PartRecord:
        """Returns the record of a task whose files are there, as they were when its attempt proved them.

        Args:
            number: The task's number.
            site: The work's site, or as it was a moment ago.

        Raises:
            NotFoundError: There is none.
            FormatError, CorruptError: It, or a file that it names, isn't what was written, or it is of another work.
        """
        place = self.place / part_name(number)
        part = read_part(site.read(part_name(number)), place)
        if (part.work, part.task) != (self.digest, number):
            raise CorruptError(
                "A part record is of another work, or of another task.",
                place=place,
                expected=f"work {self.digest}, task {number}",
                found=f"work {part.work}, task {part.task}",
                remedy="run the task again",
            )
        if site.is_over():
            return part
        faults = Faults(
            (fault, name)
            for name, entry in part.files.items()
            if (fault := site.file_fault(part, name, entry))
        )
        faults.check(
            CorruptError,
            f"The files of task {number} aren't what its attempt wrote",
            place=place,
            remedy="run the task again",
        )
        return part

    def missing(self) -> list[int]:
        """Returns the numbers of the tasks that aren't done."""
        return [number for number, part in enumerate(self.parts()) if isinstance(part, StatekitError)]


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


def site_of(place: str | os.PathLike[str] | Place, target: Place, digest: str = "") -> Site:
    """Returns where a work lies.

    Args:
        place: The work's folder.
        target: The target.
        digest: The digest of the work's document; "" where that isn't read yet.
    """
    where = checkpoint_place(place)
    if isinstance(where, StoredPlace):
        from statekit.scale.store_site import StoreSite  # entered for a work in a store only

        return StoreSite(where, target, digest)
    return DiskSite(Path(os.path.abspath(where)), target)


def read_document(folder: str | os.PathLike[str] | Place) -> WorkDocument:
    """Reads the document of a work.

    Raises:
        NotFoundError: There is none.
        FormatError: It is none.
        CorruptError: It was changed.
    """
    site = site_of(folder, checkpoint_place(folder))  # which target it has is read here
    place = site.place / DOCUMENT
    if not site.exists(DOCUMENT):
        raise NotFoundError(
            "This folder holds no work.",
            place=site.place,
            expected=DOCUMENT,
            remedy="statekit work split SRC DST",
        )
    document: Any = strict_json(site.read(DOCUMENT), place)
    fields = typed(document, WorkDocument, place, _BROKEN)
    remedy = "drop the work (statekit work drop) and split it again"
    check_own_digest(document, (FORMAT, VERSION), place, _BROKEN, remedy)
    return fields
