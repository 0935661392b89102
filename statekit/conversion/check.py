"""check: reads every byte of checkpoints, and says of each file and tensor what proves it, and whether that does.

With a manifest, every file that it names is digested; without one, or where a file isn't named, every tensor is read,
so that the checksums of its format are compared. What neither covers is listed as without a checksum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from os import PathLike
from typing import Any

from statekit.budget import Budget
from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.conversion.checkpoints_at import CheckpointAt, OneReport, PathReport, checkpoints_at
from statekit.errors import BudgetError, CorruptError, NotFoundError, StatekitError, printable
from statekit.files.checkpoint import Checkpoint
from statekit.files.checksums import HEADERS, ZIP, of_file, of_tensor, stored_in, zip_fault
from statekit.files.integrity import files_of, prove_files, value_fault
from statekit.files.manifest import SEALED
from statekit.files.source import Files
from statekit.files.stage import OnProgress, Progress, silent
from statekit.files.tree import Place, spelled
from statekit.tensors.digest import tensor_digest
from statekit.tensors.tensor import nbytes

MANIFEST = "manifest"
"""What proves a file or tensor that has a digest in a manifest."""


@dataclass(frozen=True)
class Proven:
    """A file or tensor, and what proves it.

    Attributes:
        kind: `file` or `tensor`.
        name: The file's name relative to the checkpoint, or the tensor's.
        nbytes: Its size in bytes.
        by: `manifest`, or the name of its format's own checksum; "" if it has none.
        fault: Why it isn't what it was; "" if it is, or if nothing can tell.
    """

    kind: str
    name: str
    nbytes: int
    by: str
    fault: str = ""


@dataclass(frozen=True)
class CheckedCheckpoint(OneReport):
    """What was found of one checkpoint.

    Attributes:
        is_sealed: Whether its manifest was made later, of a checkpoint as it was.
        items: Every file and tensor that was read, and what proves it.
        faults: All that is wrong, as what and where.
        notes: What else was odd, as what and where.
    """

    is_sealed: bool = False
    items: tuple[Proven, ...] = ()
    faults: tuple[tuple[str, str], ...] = ()
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def proven_by(self) -> dict[str, int]:
        """How many items each means proves; under "" those that nothing does."""
        return dict(sorted(Counter(item.by for item in self.items).items()))

    def to_json(self) -> dict[str, Any]:
        return {
            **super().to_json(),
            "sealed": self.is_sealed,
            "passed": not self.faults,
            "items": [vars(item) for item in self.items],
            "faults": [{"what": fault, "place": place} for fault, place in self.faults],
            "notes": [{"what": fault, "place": place} for fault, place in self.notes],
        }


@dataclass(frozen=True, repr=False)
class CheckReport(PathReport[CheckedCheckpoint]):
    """What was found of the checkpoints at a path."""

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts a manifest or a checksum."""
        return not any(checkpoint.faults for checkpoint in self.checkpoints)

    def __repr__(self) -> str:
        count = sum(len(checkpoint.faults) for checkpoint in self.checkpoints)
        return printable(f"<CheckReport {self.path}: {len(self.checkpoints)} checkpoints, {count} faults>")

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "passed": self.passed, **super().to_json()}


def check(
    path: CheckpointRef | str | PathLike[str],
    *,
    container: str | None = None,
    step: int | None = None,
    follow_links: bool = False,
    budget: int | None = None,
    on_progress: OnProgress | None = None,
) -> CheckReport:
    """Proves every byte that a manifest or a format's checksum covers, of each checkpoint at a path.

    Args:
        path: A checkpoint, a run's folder, or a folder of files that are checkpoints; a ref says what follows.
        container: Name of the container; found by the content if None.
        step: A step of a run's folder; all of them if None.
        follow_links: Whether to read what links out of a checkpoint lead to.
        budget: Bytes that may be held of headers, pickles and trees; the usual ones if None.
        on_progress: Told about every block.

    Raises:
        NotFoundError: Nothing is there, or no such step.
        UnknownFormatError: No container fits.
        BudgetError: Reading takes more than the budget allows, which says nothing about damage.
    """
    hints, tell = CheckpointRef(follow_links=follow_links, budget=budget), on_progress or silent
    ref = ref_of(path, hints, container=container, step=step)
    try:
        places = list(checkpoints_at(ref))
    except CorruptError as error:  # so much is lost that no container fits what is left
        return CheckReport(ref.place, (_unrecognised(ref.place, error),))
    return CheckReport(ref.place, tuple(_checked(place, tell, ref.step is not None) for place in places))


def _unrecognised(path: Place, error: CorruptError) -> CheckedCheckpoint:
    faults = ((error.line, f"{error.place or path}"),)
    return CheckedCheckpoint(path, "", None, None, faults=faults)


def _checked(place: CheckpointAt, tell: OnProgress, asked: bool) -> CheckedCheckpoint:
    """Checks one checkpoint; `asked` is whether somebody named its step, which may not be there."""
    budget = place.ref.job_budget()
    try:
        with place.opened(budget) as checkpoint:
            return _proven(checkpoint, budget, tell)
    except BudgetError:  # what can't be read with this budget isn't damaged
        raise
    except StatekitError as error:
        if asked and isinstance(error, NotFoundError) and spelled(error.place) == spelled(place.path):
            raise  # no such step: none of its files has been looked at
        where = f"{error.place or place.path}"
        return CheckedCheckpoint(
            place.path,
            place.container.name,
            place.step,
            None,
            faults=((f"can't be read: {error.line}", where),),
        )


def _places_of_tensors(checkpoint: Checkpoint) -> set[str]:
    """Returns the files that hold values of tensors."""
    return {stored.place for tensor in checkpoint.tensors.values() for stored in stored_in(tensor)}


def _damage_and_notes(checkpoint: Checkpoint) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns the damage that opening a checkpoint has found, and what else is odd, each with its place."""
    by_damage: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for finding in checkpoint.findings:
        by_damage[bool(finding.damage)].append((finding.what, finding.place))
    return by_damage[True], by_damage[False]


def _proven(checkpoint: Checkpoint, budget: Budget, tell: OnProgress) -> CheckedCheckpoint:
    proof = checkpoint.proof
    faults, notes = _damage_and_notes(checkpoint)
    faults += prove_files(
        checkpoint, budget, lambda name, done, total: tell(Progress("check", name, done, total))
    )
    files = files_of(checkpoint)
    by_manifest = {} if proof is None else proof.files
    fault_at = {place: fault for fault, place in faults}
    base = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    items = [
        Proven("file", relative(path, base), entry["bytes"], MANIFEST, fault_at.get(f"{path}", ""))
        for path, entry in by_manifest.items()
    ]
    if others := [path for path in files if path not in by_manifest]:
        tensors = list(_read_tensors(checkpoint, tell))
        other_files = list(_read_files(others, _places_of_tensors(checkpoint), checkpoint, budget))
        items += [*tensors, *other_files]
        faults += [(item.fault, item.name) for item in tensors if item.fault]
        faults += [(item.fault, f"{base / item.name}") for item in other_files if item.fault]
    return CheckedCheckpoint(
        checkpoint.path,
        checkpoint.container,
        checkpoint.step,
        None if proof is None else proof.place,
        proof is not None and SEALED in proof.manifest,
        tuple(items),
        tuple(dict.fromkeys(faults)),
        tuple(notes),
    )


def _read_files(
    paths: Iterable[Place], places: Set[str], checkpoint: Checkpoint, budget: Budget
) -> Iterator[Proven]:
    """Yields the files that hold records, which no tensor's row is about."""
    base = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    for path in paths:
        with Files(budget, checkpoint.path) as files:
            source = files.source(path)
            by = of_file(source)
            if by != ZIP and _is_held(path, places, checkpoint.path):
                continue
            fault = zip_fault(source) if by == ZIP else ""
        yield Proven("file", relative(path, base), source.size, by, fault)


def relative(path: Place, base: Place) -> str:
    """Returns the name of a file in a folder; its whole path where it lies elsewhere."""
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else f"{path}"


def _is_held(path: Place, places: Set[str], top: Place) -> bool:
    """Tells whether a file holds the values of tensors, which are proven by themselves, or is a chunk of some."""
    if path.name in HEADERS:
        return False
    return f"{path}" in places or any(f"{folder}" in places for folder in path.parents if folder != top)


def _read_tensors(checkpoint: Checkpoint, tell: OnProgress) -> Iterator[Proven]:
    """Reads every tensor, and compares it with its digest in the manifest or, by reading, its format's checksum."""
    stated: Mapping[str, Any] = checkpoint.proof.tensors if checkpoint.proof else {}
    total, done = sum(map(nbytes, checkpoint.tensors.values())), 0
    for name, tensor in checkpoint.tensors.items():
        before, fault, by = done, "", MANIFEST if name in stated else of_tensor(tensor)

        def count(size: int, name: str = name) -> None:
            nonlocal done
            done += size
            tell(Progress("check", name, done, total))

        try:
            fault = value_fault(tensor, stated.get(name), tensor_digest(tensor, count))
        except BudgetError:
            raise
        except StatekitError as error:
            fault = error.line
        done = before + nbytes(tensor)
        yield Proven("tensor", name, nbytes(tensor), by, fault)
