"""Runs one task: writes its sections into a folder of its own, reads them again, and creates its part record."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from statekit.conversion.convert import digests_of, measured_of, value_faults
from statekit.conversion.prepared import Prepared
from statekit.errors import CorruptError, some
from statekit.files.checkpoint import Checkpoint
from statekit.files.durable import writing
from statekit.files.integrity import check_no_damage, prove_files
from statekit.files.sections import Section
from statekit.files.source import Files, expecting
from statekit.files.stage import Progress, Stage
from statekit.files.tree import Place
from statekit.pipeline import job
from statekit.scale.folder import Opened, WorkFolder
from statekit.scale.parts import PartRecord, publish
from statekit.scale.progress import Attempt
from statekit.scale.tasks import FILE, Task
from statekit.tensors.tensor import Tensor, nbytes


def run(work: WorkFolder, number: int) -> PartRecord:
    """Makes an attempt at a task; returns the part record that counts, which may be another attempt's.

    Raises:
        As `Work.run`.
    """
    opened, began = work.opened, time.monotonic()
    task = opened.tasks[number]
    attempt = Attempt.begin(work.site, number, f"{number:05}-{uuid.uuid4().hex}", task.bytes)
    try:
        with job(), writing(work.place):
            done = (_write if task.kind == "write" else _check)(opened, task, attempt)
            _check_source(opened)
            part = PartRecord(work.digest, number, attempt.name, **done, seconds=time.monotonic() - began)
            repeats = all(opened.sections[name].repeats for name in task.names if task.kind == "write")
            first = publish(part, work.site, lambda: work.part(number), repeats)
    except BaseException as error:
        attempt.failed(error)
        work.site.discard(attempt.name)
        raise
    attempt.end()
    if first.attempt != attempt.name:
        work.site.discard(attempt.name)
    return first


def _write(opened: Opened, task: Task, attempt: Attempt) -> dict[str, Any]:
    """Writes sections and reads them again; returns the fields of the part record."""
    prepared = opened.prepared
    sections = [opened.sections[name] for name in task.names]
    tensors = {name: tensor for section in sections for name, tensor in section.tensors.items()}
    # The next task is seldom of the next bytes, and a process that ends waits for what it has asked for.
    is_known = tensors.keys() <= opened.passed.keys()
    total = sum(map(nbytes, tensors.values())) if is_known else None
    checkpoint = prepared.opened.checkpoint
    with attempt.site.attempted(attempt.name, task.bytes) as home:
        stage = Stage(home, task.bytes, _on_progress=attempt.tell, _budget=prepared.opened.budget)
        stage.expect(tensors)
        with prepared.joining(), expecting(checkpoint.path, total):
            records = {section.name: section.write(stage) for section in sections}
        passed = {
            opened.passed[name]: entry["blake3"]
            for name, entry in stage.tensors.items()
            if name in opened.passed
        }
        check_no_damage(value_faults(checkpoint, passed), checkpoint.path)
        proven = stage.prove(lambda path: _reopened(prepared, path, sections, records))
        files = attempt.site.proven(home, proven)
    measured = measured_of(
        opened.plan, [tensor for section in sections for tensor in section.tensors.values()]
    )
    return {
        "files": files,
        "tensors": dict(stage.tensors),
        "checked": {},
        "records": records,
        "measured": tuple(vars(measure) for measure in measured),
    }


def _reopened(
    prepared: Prepared, path: Place, sections: list[Section], records: dict[str, Any]
) -> Checkpoint:
    """Opens sections that were written."""
    with ExitStack() as stack:
        files = stack.enter_context(Files(prepared.opened.budget, path))
        tensors: dict[str, Tensor] = {}
        for section in sections:
            tensors |= section.read(path, files, records[section.name])
        keep = stack.pop_all()
    return Checkpoint(prepared.container.name, path, dict(tensors), on_close=keep.close)


def _check(opened: Opened, task: Task, attempt: Attempt) -> dict[str, Any]:
    """Proves tensors and files of the source that nobody writes as they are."""
    checkpoint = opened.prepared.opened.checkpoint
    rest = {name: opened.rest[name] for name in task.names if not name.startswith(FILE)}
    digests = digests_of(rest, attempt.tell)
    faults = value_faults(checkpoint, digests)
    faults += _file_faults(
        opened, {name.removeprefix(FILE) for name in task.names if name.startswith(FILE)}, attempt
    )
    check_no_damage(faults, checkpoint.path)
    return {"files": {}, "tensors": {}, "checked": digests, "records": {}}


def _file_faults(opened: Opened, names: set[str], attempt: Attempt) -> Iterator[tuple[str, str]]:
    """Yields which files of the source aren't what its manifest says."""
    checkpoint = opened.prepared.opened.checkpoint
    proof = checkpoint.proof
    if not names or proof is None:
        return

    def tell(name: str, done: int, total: int) -> None:
        attempt.tell(Progress("check", name, done, total))

    entries = {path: entry for path, entry in proof.files.items() if f"{path}" in names}
    some_files = replace(checkpoint, proof=replace(proof, files=entries))
    yield from prove_files(some_files, opened.prepared.opened.budget, tell)


def _check_source(opened: Opened) -> None:
    """Refuses what was read of a source that was changed meanwhile."""
    if not opened.prepared.is_current:
        raise CorruptError(
            "The source was changed while a task read it.",
            place=opened.plan.request.ref.place,
            found=some([f"{place}" for place in opened.prepared.files]),
            remedy="drop the work (statekit work drop) and split it again",
        )
