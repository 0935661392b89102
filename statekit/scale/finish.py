"""Finishes a work: joins what its tasks wrote, proves it, and gives it the target's name in one step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from statekit.budget import collecting_rarely
from statekit.conversion.convert import (
    Report,
    check_place,
    check_streamed,
    content_digest,
    goes_on_with_masters,
    kept_fields,
    manifest_entries,
    manifest_fields,
    proven_beside,
    source_digests,
    value_faults,
)
from statekit.conversion.rounded import Measured
from statekit.errors import (
    CommitError,
    Faults,
    NotFoundError,
    StatekitError,
    TargetExistsError,
    UsageError,
    some,
)
from statekit.files.durable import writing
from statekit.files.homes import Entries, permissions
from statekit.files.integrity import check_no_damage
from statekit.files.manifest import FILE, file_entry, files_below, require_manifest
from statekit.files.sections import CutPoints
from statekit.files.stage import Stage, silent
from statekit.files.tree import Place
from statekit.pipeline import job
from statekit.scale.folder import Opened, WorkFolder
from statekit.scale.parts import PartRecord
from statekit.state.stored_params import check_masters


@collecting_rarely()
def finish(work: WorkFolder, again: bool = False) -> Report:
    """Finishes a work. Arguments and errors are those of `Work.finish`."""
    began = time.monotonic()
    parts = _parts(work)
    plan = work.opened.plan
    digests = _digests(work.opened, parts)
    if _is_finished(work, parts):
        work.site.end()  # a process that was killed here has left that out
        return _report(work, parts, digests, _entries_of(work.target), _source_digest(work), began)
    check_place(plan, replace=False, replace_foreign=False)
    try:
        with job():
            files, source = _joined(work, parts, digests, again)
    except (TargetExistsError, CommitError):  # perhaps another process has finished it meanwhile
        if not _is_finished(work, parts):
            raise
        files, source = _entries_of(work.target), _source_digest(work)
    work.site.end()
    return _report(work, parts, digests, files, source, began)


def _source_digest(work: WorkFolder) -> str:
    return require_manifest(work.target)["source"].get("digest") or ""


def _parts(work: WorkFolder) -> list[PartRecord]:
    """Returns the part record of every task."""
    faults, parts = Faults(), list[PartRecord]()
    for number, part in enumerate(work.parts()):
        if isinstance(part, PartRecord):
            parts.append(part)
        else:
            faults.add("isn't done" if isinstance(part, NotFoundError) else part.line, f"task {number}")
    faults.check(
        UsageError,
        "Tasks of this work are missing, or their part records can't be trusted",
        place=work.place,
        remedy=f"statekit work run {work.place} --here",
    )
    return parts


def _digests(opened: Opened, parts: Sequence[PartRecord]) -> dict[str, str]:
    """Returns the digests of the source's tensors, as the tasks had them, and checks what they wrote."""
    rest = {name: digest for part in parts for name, digest in part.checked.items()}
    faults = Faults(fault for part in parts for fault in _part_faults(opened, part))
    if rest.keys() != opened.rest.keys():
        faults.add("lack digests of the source's tensors, or have others", "part records")
    faults.check(UsageError, "Part records aren't those of this work's tasks", remedy="run the tasks again")
    streamed = {name: entry for part in parts for name, entry in part.tensors.items()}
    return source_digests(rest, opened.passed, streamed)


def _part_faults(opened: Opened, part: PartRecord) -> Iterator[tuple[str, str]]:
    """Yields what in a part record isn't what its task writes, and where."""
    task, place = opened.tasks[part.task], f"part record of task {part.task}"
    sections = [opened.sections[name] for name in task.names if task.kind == "write"]
    # A file may hold its tensors in an order of its own, such as by dtype.
    if sorted(name for section in sections for name in section.tensors) != sorted(part.tensors):
        yield "has other tensors than the task", place
    begins = tuple(begin for section in sections for begin in section.files or (section.name,))
    if foreign := [name for name in part.files if not name.startswith(begins)]:
        yield f"has files that the task doesn't write: {some(foreign)}", place
    for section in sections:
        yield from section.record_faults(part.records.get(section.name))


def _joined(
    work: WorkFolder, parts: Sequence[PartRecord], digests: Mapping[str, str], again: bool
) -> tuple[Entries, str]:
    """Writes the target from the files of the tasks; returns the entries of its files, and the source's digest."""
    opened = work.opened
    plan, prepared = opened.plan, opened.prepared
    checkpoint = prepared.opened.checkpoint
    lineage = list[dict[str, Any]]()
    for model in prepared.beside:
        faults, entry = proven_beside(model, silent)
        check_no_damage(faults, model.checkpoint.path)
        lineage.append(entry)
    if goes_on_with_masters(plan, prepared):
        check_masters(prepared.opened.state, checkpoint.path)

    @cache
    def source() -> str | None:
        """Returns the digest of the source's content, when all that is written was streamed."""
        return content_digest(checkpoint, {**digests, **source_digests({}, opened.passed, stage.tensors)})

    def fields(_: Entries) -> Mapping[str, Any]:
        return {
            **manifest_fields(plan, source(), files_below(stage.path)),
            **({"beside": lineage} if lineage else {}),
            **kept_fields(plan, prepared),
        }

    with work.site.now().joined(parts, permissions(prepared.places)) as home:
        stage = Stage(home, _fields=fields, _budget=prepared.opened.budget)
        for part in parts:
            stage.adopt(part.tensors, part.files_alone())
        with writing(stage.target), prepared.joining():
            records = {name: record for part in parts for name, record in part.records.items()}
            cut = CutPoints(work.document["task_bytes"])
            prepared.cuttable().join(prepared.encoded, stage, cut, records)
            work.site.settle(home)
        check_streamed(plan, stage)
        check_no_damage(
            value_faults(checkpoint, source_digests({}, opened.passed, stage.tensors)), checkpoint.path
        )
        if again:
            stage.forget()
        return stage.commit(prepared.reopen), source() or ""


def _is_finished(work: WorkFolder, parts: Sequence[PartRecord]) -> bool:
    """Tells whether the target is there already, made of these parts."""
    target = work.target
    if not (target / FILE).is_file():
        return False
    try:
        manifest = require_manifest(target)
    except StatekitError:
        return False
    files = {name: entry["blake3"] for name, entry in manifest["files"].items()}
    written = {name: entry["blake3"] for part in parts for name, entry in part.files.items()}
    # In a store a process that was killed may have put the manifest, and not all files that come after it.
    return (
        manifest.get("plan") == work.document["plan"]
        and written.items() <= files.items()
        and all((target / name).is_file() for name in files)
    )


def _entries_of(target: Place) -> Entries:
    return {**require_manifest(target)["files"], FILE: file_entry(target / FILE)}


def _report(
    work: WorkFolder,
    parts: Sequence[PartRecord],
    digests: Mapping[str, str],
    files: Entries,
    source: str,
    began: float,
) -> Report:
    opened = work.opened
    checkpoint = opened.prepared.opened.checkpoint
    return Report(
        target=work.target,
        plan=opened.plan,
        files=files,
        bytes=sum(int(entry["bytes"]) for entry in files.values()),
        seconds=time.monotonic() - began,
        verified=len(opened.plan.entries),
        source_digest=source,
        source_proven=len(manifest_entries(checkpoint).keys() & digests.keys()),
        measured=_measured(parts),
    )


def _measured(parts: Sequence[PartRecord]) -> tuple[Measured, ...]:
    """Returns how far all that was rounded is off, of all tasks together."""
    together: dict[str, Measured] = {}
    for part in parts:
        for fields in part.measured:
            measured = Measured(**{field.name: fields[field.name] for field in dataclasses.fields(Measured)})
            before = together.get(measured.asked, Measured(measured.asked))
            together[measured.asked] = Measured(
                measured.asked,
                before.values + measured.values,
                before.rounded + measured.rounded,
                max(before.largest, measured.largest),
                before.lost + measured.lost,
            )
    return tuple(together.values())
