"""seal: writes a manifest beside a checkpoint as it is, so that `check` notices every later change.

The checkpoint's own files aren't touched. Nothing is sealed whose format's own checksums contradict it, and no manifest
is renewed that proves damage: only files that were written to since are taken as they are now, and those that the user
names.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from statekit.budget import Budget
from statekit.conversion.check import relative
from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.conversion.checkpoints_at import CheckpointAt, OneReport, PathReport, checkpoints_at
from statekit.errors import CorruptError, Faults, RefusedError, UsageError, printable
from statekit.files.checkpoint import Checkpoint, Proof
from statekit.files.checksums import of_tensor
from statekit.files.durable import replace_file
from statekit.files.file_changes import Change, FileFault, file_faults
from statekit.files.homes import Entries, permissions
from statekit.files.integrity import files_of, manifest_place, proving_files, records_of, top_of, value_fault
from statekit.files.manifest import (
    CHECKPOINT,
    FILE,
    RECORDS,
    SEALED,
    Passing,
    inside,
    sealed,
    tensor_entry,
    to_text,
)
from statekit.files.source import Files, checkpoint_place, reading
from statekit.files.stage import OnProgress, Progress, digested, silent, unknown_fields
from statekit.files.tree import Place, copying, spelled
from statekit.tensors.digest import tensor_digest
from statekit.tensors.tensor import nbytes
from statekit.tensors.typed import is_unicode

NEUTRAL = "statekit"
"""The container whose manifest holds its records too, and can't be made anew."""
_OF_DIGESTS = ("format", "version", "tool", "digest", CHECKPOINT, SEALED, RECORDS, "tensors", "files")
_OF_VALUES = ("state", "resume")
"""Fields that say what the values mean, which nobody knows once they have changed."""


@dataclass(frozen=True)
class SealedCheckpoint(OneReport):
    """What was done for one checkpoint.

    Attributes:
        manifest: Where its manifest is.
        done: `sealed`, `renewed`, or `proven`: it had a manifest that fits, and nothing was written.
        files: How many files the manifest names.
        tensors: How many tensors.
        digest: BLAKE3 of the manifest, which names every byte of the checkpoint.
        changed: Files that aren't what an earlier manifest said, or that it didn't name.
    """

    manifest: Path
    done: Literal["sealed", "renewed", "proven"]
    files: int
    tensors: int
    digest: str
    changed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), **super().to_json(), "changed": list(self.changed)}


@dataclass(frozen=True, repr=False)
class SealReport(PathReport[SealedCheckpoint]):
    """What was done for the checkpoints at a path."""


def seal(
    path: CheckpointRef | str | PathLike[str],
    *,
    container: str | None = None,
    step: int | None = None,
    renew: Collection[str] = (),
    follow_links: bool = False,
    budget: int | None = None,
    on_progress: OnProgress | None = None,
) -> SealReport:
    """Writes a manifest beside each checkpoint at a path that has none which fits.

    Args:
        path: A checkpoint, a run's folder, or a folder of files that are checkpoints; a ref says what follows.
        container: Name of the container; found by the content if None.
        step: A step of a run's folder; all of them if None.
        renew: Files that an earlier manifest contradicts and that are taken as they are now: paths, or names as the
            manifest has them. What was written to since is taken without being named.
        follow_links: Whether to read what links out of a checkpoint lead to.
        budget: Bytes that may be held of headers, pickles and trees; the usual ones if None.
        on_progress: Told about every block.

    Raises:
        NotFoundError: Nothing is there, or no such step.
        UsageError: `renew` names what is no file of any of them; nothing was sealed.
        FormatError: A checkpoint can't be read.
        CorruptError: A checksum of the format contradicts it, or an earlier manifest does; the checkpoints before it
            have been sealed.
        CommitError: The manifest can't be written.
    """
    hints, tell = CheckpointRef(follow_links=follow_links, budget=budget), on_progress or silent
    ref = ref_of(path, hints, container=container, step=step)
    if not isinstance(ref.place, Path):
        raise UsageError(
            "A checkpoint in a store can't be sealed: its manifest would have to be written there.",
            place=ref.place,
            remedy=f"seal a local copy and copy its manifest back: {copying(f'{ref.place}')}",
        )
    places = list(checkpoints_at(ref))
    if renew:
        _check_names(places, renew)
    return SealReport(ref.place, tuple(_sealed(place, renew, tell) for place in places))


def _check_names(places: Iterable[CheckpointAt], renew: Collection[str]) -> None:
    """Refuses names that are no file of a checkpoint, neither on disk nor in its manifest."""
    names: set[str] = set()
    for place in places:
        with place.opened() as checkpoint:
            proof = checkpoint.proof
            base = (manifest_place(checkpoint) if proof is None else proof.place).parent
            damaged = [checkpoint_place(finding.place) for finding in checkpoint.findings if finding.damage]
            paths = [*files_of(checkpoint), *(() if proof is None else proof.files), *damaged]
            names.update(name for path in paths for name in _names(path, base))
    Faults(("is no file of the checkpoint", name) for name in renew if not _is_one(name, names)).check(
        UsageError, "There is nothing to take as it is now", place="--renew"
    )


def _is_one(name: str, names: Collection[str]) -> bool:
    return name in names or os.path.abspath(name) in names


def _names(path: Place, base: Place) -> tuple[str, str, str]:
    """Returns the names of a file that a user may give: as it is, absolute, and as the manifest has it."""
    return f"{path}", spelled(path), relative(path, base)


def _sealed(place: CheckpointAt, renew: Collection[str], tell: OnProgress) -> SealedCheckpoint:
    budget = place.ref.job_budget()
    with place.opened(budget) as checkpoint:
        paths, proof = files_of(checkpoint), checkpoint.proof
        before = _facts(paths)
        changed = _changed(checkpoint, paths, budget)
        if proof is not None and not changed:
            return _report(checkpoint, proof.place, "proven", proof.manifest)
        _check_renewed(checkpoint, changed, renew)
        target = Path(manifest_place(checkpoint) if proof is None or proof.is_inside else proof.place)
        _check_names_fit(paths, target.parent)
        with Files(budget, checkpoint.path) as opened, ExitStack() as stack:
            base = target.parent
            read = {path.relative_to(base).as_posix(): (opened.source(path), Passing()) for path in paths}
            for file, passing in read.values():
                if file.identity not in budget.listeners:  # a file may have several names
                    stack.enter_context(passing.read(file))
            tensors = _tensor_entries(checkpoint, tell)
            files = digested(read)

        def check(new: Path | None = None) -> None:
            if _facts(paths) != before:
                raise CorruptError(
                    "The checkpoint was written to while it was sealed.",
                    place=checkpoint.path,
                    remedy="seal it when no program writes to it",
                )
            if new is not None:  # whoever writes to it from now on does so later than the manifest says
                with suppress(OSError):
                    os.utime(new, ns=(max(times), max(times)))

        times = [time for _, time, *_ in before.values()]
        check()
        names = [relative(fault.path, target.parent) for fault in changed]
        manifest = _manifest(checkpoint, target, tensors, files, names)
        text = to_text(manifest).encode("ascii")
        above = target.parent if target.name == FILE else None
        replace_file(target, text, permissions(map(Path, paths)), check, above)
        return _report(checkpoint, target, "sealed" if proof is None else "renewed", manifest, names)


def _check_names_fit(paths: Iterable[Place], base: Place) -> None:
    """Refuses files whose names no manifest may have, as it would be refused with them when it is read."""
    names = [relative(path, base) for path in paths]
    Faults(
        ("has a colon, a backslash, or bytes that are no text", printable(name))
        for name in names
        if not (inside(name) and is_unicode(name))
    ).check(
        RefusedError,
        "A manifest can't have these names",
        place=base,
        remedy="rename the files, then seal them",
    )


def _report(
    checkpoint: Checkpoint,
    place: Place,
    done: Literal["sealed", "renewed", "proven"],
    manifest: Mapping[str, Any],
    changed: Sequence[str] = (),
) -> SealedCheckpoint:
    figures = len(manifest["files"]), len(manifest["tensors"]), str(manifest["digest"])
    return SealedCheckpoint(
        checkpoint.path, checkpoint.container, checkpoint.step, Path(place), done, *figures, tuple(changed)
    )


def _changed(checkpoint: Checkpoint, paths: Sequence[Place], budget: Budget) -> list[FileFault]:
    """Reads all files of a checkpoint; returns those that differ from its manifest or are missing."""
    proof = checkpoint.proof
    if proof is None:  # one that can't be trusted is no proof, and not to be written over
        damage = [finding for finding in checkpoint.findings if finding.damage]
        return [
            FileFault(checkpoint_place(finding.place), Change.DAMAGED, finding.what) for finding in damage
        ]
    if proof.is_inside:
        return _changed_inside(checkpoint, proof, budget)
    with Files(budget, checkpoint.path) as files:
        faults = file_faults(proof.files, proof.place, files, proof.files)
    lacking = [path for path in paths if path not in proof.files]
    return [*faults, *(FileFault(path, Change.REWRITTEN, "isn't in the manifest") for path in lacking)]


def _changed_inside(checkpoint: Checkpoint, proof: Proof, budget: Budget) -> list[FileFault]:
    """Returns the file, if its tensors, or other bytes, aren't what the manifest inside says.

    Where checksums of the format fit nevertheless, somebody wrote them with the values.
    """
    faults = [(finding.what, finding.place) for finding in checkpoint.findings if finding.damage]
    digests = dict[str, str]()
    with proving_files(checkpoint, budget) as rest:
        for name, tensor in checkpoint.tensors.items():
            digests[name] = tensor_digest(tensor)
            if fault := value_fault(tensor, proof.tensors.get(name), digests[name]):
                faults.append((fault, name))
        faults += rest(digests)
    if not faults:
        return []
    has_checksums = all(map(of_tensor, checkpoint.tensors.values()))
    change = Change.REWRITTEN if has_checksums else Change.UNTOLD
    return [FileFault(checkpoint.path, change, f"{fault} @ {place}") for fault, place in faults[:1]]


def _check_renewed(checkpoint: Checkpoint, changed: Sequence[FileFault], renew: Collection[str]) -> None:
    """Refuses to take files as they are now that may be damaged, unless the user has named them."""
    proof, faults = checkpoint.proof, list(changed)
    if proof is not None and (not proof.is_whole or checkpoint.container == NEUTRAL):
        renew = ()
        remedy = "restore the checkpoint from a copy; or convert what is there with --accept-damaged"
    else:
        faults = [fault for fault in changed if fault.change is not Change.REWRITTEN]
        remedy = "restore these files from a copy; if they are as they shall be, name them: --renew FILE"
    base = (manifest_place(checkpoint) if proof is None else proof.place).parent
    named = {*renew, *map(os.path.abspath, renew)}
    left = [fault for fault in faults if not {*_names(fault.path, base)} & named]
    Faults((fault.what, f"{fault.path}") for fault in left).check(
        CorruptError,
        "A new manifest would cover up that the checkpoint isn't what was written",
        place=checkpoint.path,
        remedy=remedy,
    )


def _facts(paths: Sequence[Place]) -> dict[Place, tuple[int, ...]]:
    """Returns size, times and number of files, which tell whether somebody writes to them; who copies sets one time."""
    facts: dict[Place, tuple[int, ...]] = {}
    for path in paths:
        with reading(path):
            status = Path(path).stat()
        facts[path] = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
    return facts


def _tensor_entries(checkpoint: Checkpoint, tell: OnProgress) -> dict[str, dict[str, Any]]:
    """Digests every tensor; reading compares the checksums of its format."""
    total, done, entries = sum(map(nbytes, checkpoint.tensors.values())), 0, {}
    for name, tensor in checkpoint.tensors.items():

        def count(size: int, name: str = name) -> None:
            nonlocal done
            done += size
            tell(Progress("check", name, done, total))

        entries[name] = tensor_entry(tensor, tensor_digest(tensor, count))
    return entries


def _manifest(
    checkpoint: Checkpoint, place: Place, tensors: Entries, files: Entries, changed: Collection[str]
) -> dict[str, Any]:
    """Returns the new manifest, with the fields of an earlier one that still hold."""
    proof = checkpoint.proof
    if proof is None:
        step = checkpoint.step if checkpoint.is_numbered else None
        target = {"container": checkpoint.container, "layout": None, "step": step}
        fields, foreign = {**unknown_fields({}), "target": target}, {*files}
    else:
        fields = {key: value for key, value in proof.manifest.items() if key not in _OF_DIGESTS}
        if tensors != proof.tensors:
            fields = {key: value for key, value in fields.items() if key not in _OF_VALUES} | {"state": {}}
        stated = proof.manifest["files"]
        others = {name: fact for name, fact in stated.items() if place.parent / name not in proof.files}
        files, foreign = {**others, **files}, {*proof.manifest.get(SEALED, ()), *changed}
    top = top_of(checkpoint).relative_to(place.parent).as_posix()
    digests = {**records_of(checkpoint), "tensors": tensors, "files": files}
    return sealed({**fields, CHECKPOINT: top, SEALED: sorted(foreign), **digests})
