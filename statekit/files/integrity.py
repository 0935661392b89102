"""The one verdict on a checkpoint's integrity: is it what its manifest says?

Input: a checkpoint as its container opened it. `proven` finds its manifest, whatever the container: beside it, in its
folder or the run's, or inside its file; and compares sizes, small files, names, shapes and dtypes. What contradicts a
manifest that is about these very files is damage, and whoever opens the checkpoint refuses that (`check_undamaged`)
unless the user has asked to go on; `prove_files` reads what else the manifest names. Files and steps that no manifest
names are none of its business: a run goes on in its folder.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from statekit.budget import Account, Budget
from statekit.errors import BudgetError, CorruptError, Faults, StatekitError
from statekit.files.checkpoint import STEPS, Checkpoint, Finding, Proof
from statekit.files.checksums import of_tensor
from statekit.files.file_changes import SMALL_BYTES, file_faults
from statekit.files.manifest import (
    CHECKPOINT,
    FILE,
    RECORDS,
    REST,
    SEALED,
    Passing,
    beside,
    check_inside,
    digest_by,
    files_below,
    is_manifest,
    leaves_in,
    parse,
    size_fault,
    stated_spans,
    tensor_entry,
    tensor_faults,
    whole_file_fault,
)
from statekit.files.source import File, Files, listing, read_small
from statekit.files.tree import Place, size_of
from statekit.tensors.digest import records_digest
from statekit.tensors.tensor import Stored, Tensor

_NUMBER = re.compile(r"\d+")
_NAME_BYTES = 255
"""How long a file's name may be on this machine."""
_REMEDY = (
    "restore the checkpoint from a copy, or seal it anew if it was changed on purpose (`statekit seal`); "
    "--accept-damaged (in Python accept_damaged=True) goes on with what is there, without the manifest"
)


def _nobody(name: str, done: int, total: int) -> None:
    """Tells nobody."""


def proof_inside(
    text: str, path: Place, account: Account | None = None
) -> tuple[Proof | None, tuple[Finding, ...]]:
    """Returns the proof of a checkpoint that is one file, by the manifest inside it; or why that isn't trusted.

    Args:
        text: The manifest.
        path: The file.
        account: The checkpoint's, which holds the manifest.

    Raises:
        BudgetError: It is more than the job may hold.
    """
    try:
        manifest = parse(text, path, account)
    except BudgetError:
        raise
    except StatekitError as error:
        return None, (Finding(f"the manifest inside isn't trusted: {error.line}", f"{path}", True),)
    return Proof(path, manifest, {}, manifest["tensors"], is_inside=True), ()


def proven(checkpoint: Checkpoint, budget: Budget | None = None) -> Checkpoint:
    """Returns an opened checkpoint with its proof, and with all that contradicts it as damage among its findings.

    A manifest beside a file outweighs the one inside, over which it was sealed.

    Args:
        checkpoint: As its container opened it.
        budget: The job's, which holds the manifest until the checkpoint is closed.

    Raises:
        RefusedError: A file that the manifest names lies behind a link out of the checkpoint.
    """
    files = Files(budget, checkpoint.path)
    try:
        compared = _compared(checkpoint, files)
    except BaseException:
        files.close()
        raise

    def close() -> None:
        files.close()
        checkpoint.on_close()

    return replace(compared, on_close=close)


def _compared(checkpoint: Checkpoint, files: Files) -> Checkpoint:
    findings = list(checkpoint.findings)
    proof = checkpoint.proof
    if proof is None or proof.is_inside:
        proof = _beside(checkpoint, files, findings) or proof
    if proof is None:
        return replace(checkpoint, findings=tuple(findings))
    later = _later(checkpoint, proof)
    findings += [Finding(fault, place, True) for fault, place in _faults(checkpoint, proof, files, later)]
    findings += [Finding("the manifest doesn't name this file", f"{path}") for path in later]
    trusted = proof.is_whole and not any(finding.damage for finding in findings)
    return replace(
        checkpoint, proof=proof, manifest=proof.manifest if trusted else None, findings=tuple(findings)
    )


def _beside(checkpoint: Checkpoint, files: Files, findings: list[Finding]) -> Proof | None:
    """Returns the proof by the nearest manifest that names one of a checkpoint's files; notes one that isn't trusted.

    All files that it names must be there, those too that no reader opens: what was written is all of them. Where the
    run went on in the manifest's folder, only the checkpoint's own files count: the run writes others, and removes
    old ones.
    """
    nearest = manifest_place(checkpoint), checkpoint.path / FILE
    for place in filter(_can_be_named, _places(checkpoint)):
        if not place.is_file():
            if place in nearest and _is_named(place):
                findings.append(Finding("the manifest is no file", f"{place}", True))
                return None
            continue
        try:
            manifest = _manifest_at(place, checkpoint, files)
        except BudgetError:
            raise
        except StatekitError as error:
            findings.append(Finding(f"the manifest isn't trusted: {error.line}", f"{place}", True))
            return None
        if manifest is None:
            continue
        files_named = {place.parent / name: entry for name, entry in manifest["files"].items()}
        entries = {path: entry for path, entry in files_named.items() if _is_part(path, checkpoint)}
        if entries or place in nearest:
            is_whole = _is_whole(checkpoint, place, manifest)
            stated = entries if _went_on(place.parent, manifest) else files_named
            return Proof(place, manifest, stated, manifest["tensors"] if is_whole else {}, is_whole)
    return None


def _can_be_named(place: Place) -> bool:
    return not isinstance(place, Path) or len(os.fsencode(place.name)) <= _NAME_BYTES


def _is_named(place: Place) -> bool:
    """Tells whether anything has a name, be it a link that leads nowhere."""
    return place.exists() or place.is_symlink()


def _manifest_at(place: Place, checkpoint: Checkpoint, files: Files) -> Mapping[str, Any] | None:
    """Returns the manifest at a place; None of one that is another file's.

    A folder has as many of these as it has sealed files, so they are searched for the checkpoint's names, not parsed.
    """
    data = read_small(place, files)
    names = [json.dumps(part.name)[1:-1].encode("ascii") for part in checkpoint.parts or (checkpoint.path,)]
    if place not in (manifest_place(checkpoint), place.parent / FILE) and not any(
        name in data for name in names
    ):
        return None
    manifest = parse(data, place, files.account)
    check_inside(place.parent, manifest)
    return manifest


def _went_on(folder: Place, manifest: Mapping[str, Any]) -> bool:
    """Tells whether a run wrote another step beside the files of a manifest: `ckpt-8.index` beside `ckpt-4.index`."""
    named = {name.partition("/")[0] for name in manifest["files"]}
    numbered = {_NUMBER.sub("#", name) for name in named if _NUMBER.search(name)}
    return any(path.name not in named and _NUMBER.sub("#", path.name) in numbered for path in listing(folder))


def check_whole(folder: Place) -> None:
    """Refuses a folder that lacks files of a manifest in it, or has others in their place; no container is asked.

    What container opens the rest, if any, says nothing about what is lost. A manifest of which no file is left isn't
    about anything that is here: a run removes its old steps.

    Raises:
        CorruptError: Lists the files.
    """
    faults = Faults()
    for place in [path for path in listing(folder) if is_manifest(path.name) and path.is_file()]:
        try:
            manifest = parse(read_small(place), place)
            check_inside(folder, manifest)
        except StatekitError:  # whoever opens what it is about says why it isn't trusted
            continue
        entries = {folder / name: entry for name, entry in manifest["files"].items()}
        if not any(entry.exists() or entry.is_symlink() for entry in entries) or _went_on(folder, manifest):
            continue
        with Files() as files:
            faults += [(fault.what, f"{fault.path}") for fault in file_faults(entries, place, files, ())]
    check_no_damage(faults, folder)


def _places(checkpoint: Checkpoint) -> Iterator[Place]:
    """Yields where a checkpoint's manifest may lie: its own place, those of the folders that it lies in, its parts'.

    A file whose partner was lost is a checkpoint by itself, and the manifest of both may bear the partner's name.
    """
    yield (nearest := manifest_place(checkpoint))
    top = top_of(checkpoint)
    yield top.parent / FILE
    yield top.parent.parent / FILE
    if top.is_file():
        yield from (path for path in listing(top.parent) if is_manifest(path.name) and path != nearest)


def manifest_place(checkpoint: Checkpoint) -> Place:
    """Returns where a manifest of a checkpoint alone lies: in its folder, or beside its file."""
    top = top_of(checkpoint)
    return top / FILE if top.is_dir() else beside(top)


def top_of(checkpoint: Checkpoint) -> Place:
    """Returns a checkpoint's folder, or the file that stands for it."""
    return checkpoint.parts[0] if checkpoint.parts else checkpoint.path


def files_of(checkpoint: Checkpoint) -> list[Place]:
    """Returns a checkpoint's files, sorted; no manifest is among them."""
    tops = checkpoint.parts or (checkpoint.path,)
    files = [
        file
        for top in tops
        for file in ([top / name for name in files_below(top)] if top.is_dir() else [top])
    ]
    return sorted(file for file in files if not is_manifest(file.name))


def _is_part(path: Place, checkpoint: Checkpoint) -> bool:
    return any(path.is_relative_to(part) for part in checkpoint.parts or (checkpoint.path,))


def _is_whole(checkpoint: Checkpoint, place: Place, manifest: Mapping[str, Any]) -> bool:
    """Tells whether a manifest is about a checkpoint, and not about what it is a part of."""
    top, stated = top_of(checkpoint), manifest.get(CHECKPOINT)
    if stated is not None:
        is_it = place.parent / stated == top
    else:  # written before manifests said it
        is_it = place.parent in (top, top.parent) and manifest["target"]["container"] == checkpoint.container
    return is_it or not tensor_faults(manifest, checkpoint.tensors)


def _faults(
    checkpoint: Checkpoint, proof: Proof, files: Files, later: Sequence[Place]
) -> list[tuple[str, str]]:
    """Returns what contradicts a checkpoint's proof, as far as opening looks; `later` are files it doesn't name."""
    wrong = file_faults(proof.files, proof.place, files) if proof.files else []
    faults = [(fault.what, f"{fault.path}") for fault in wrong]
    if not proof.is_whole:
        return faults
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if not _is_bytes_of(tensor, later)}
    faults += tensor_faults(proof.manifest, tensors)
    if proof.is_inside:
        file = files.source(proof.place)
        faults += _rest_faults(proof, file, whole_file_fault if file.size <= SMALL_BYTES else size_fault)
    stated = proof.manifest["target"].get("step")
    if checkpoint.is_numbered and None not in (checkpoint.step, stated) and checkpoint.step != stated:
        faults.append((f"is of step {checkpoint.step}, in the manifest {stated}", f"{checkpoint.path}"))
    return faults


def _later(checkpoint: Checkpoint, proof: Proof) -> list[Place]:
    """Returns the files in a checkpoint's folder that the manifest there, or in the run's folder, doesn't name."""
    top = proof.place.parent
    if proof.place.name != FILE or not checkpoint.path.is_relative_to(top) or not checkpoint.path.is_dir():
        return []
    above = "".join(f"{part}/" for part in checkpoint.path.relative_to(top).parts)
    names = [f"{above}{name}" for name in files_below(checkpoint.path)]
    stated = proof.manifest["files"]
    return [top / name for name in names if name not in stated and not is_manifest(name.rpartition("/")[2])]


def _is_bytes_of(tensor: Tensor, later: Sequence[Place]) -> bool:
    """Tells whether a tensor is the bytes of a whole file that the manifest doesn't name.

    A folder goes on to get other files, as the config that a library needs to load it: they are said, and no damage.
    """
    if not isinstance(tensor, Stored) or tensor.dtype != np.uint8 or tensor.chunk is not None:
        return False
    return any(tensor.place == f"{path}" and tensor.shape == (size_of(path),) for path in later)


@dataclass(frozen=True)
class Means:
    """What a checkpoint can be proven by.

    Attributes:
        manifest: Its manifest; None if there is none, or if it isn't trusted.
        is_sealed: Whether the manifest was made later, of a checkpoint as it was.
        tensors: How many tensors have each of their format's own checksums, by its name; "" is none.
    """

    manifest: Place | None = None
    is_sealed: bool = False
    tensors: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        path = None if self.manifest is None else str(self.manifest)
        return {"manifest": path, "sealed": self.is_sealed, "checksums": dict(self.tensors)}


def means_of(checkpoint: Checkpoint) -> Means:
    """Tells what an opened checkpoint can be proven by, without reading it."""
    proof = checkpoint.proof
    tensors = Counter(of_tensor(tensor) for tensor in checkpoint.tensors.values())
    is_sealed = proof is not None and SEALED in proof.manifest
    return Means(None if proof is None else proof.place, is_sealed, dict(sorted(tensors.items())))


def _apart(proof: Proof) -> list[tuple[int, int]]:
    """Returns the runs of bytes that a manifest inside leaves out of its file's digest; none if it doesn't say."""
    try:
        return stated_spans(proof.manifest.get(REST) or {"apart": ()})
    except ValueError:
        return []


def _rest_faults(
    proof: Proof, file: File, fault: Callable[[File, Mapping[str, Any]], str]
) -> list[tuple[str, str]]:
    """Compares a file with what the manifest inside says of all its bytes, if it does."""
    rest = proof.manifest.get(REST)
    difference = fault(file, rest) if rest is not None else ""
    return [(difference, f"{file.path}")] if difference else []


def records_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the manifest's field about what a checkpoint holds besides tensors; none if nobody can digest that."""
    meta = {key: value for key, value in checkpoint.meta.items() if key != STEPS}
    digest = records_digest(checkpoint.tree, meta)
    return {} if digest is None else {RECORDS: digest}


def check_undamaged(checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint that its manifest contradicts, as far as opening has looked.

    Raises:
        CorruptError: Lists everything that does.
    """
    faults = Faults((finding.what, finding.place) for finding in checkpoint.findings if finding.damage)
    check_no_damage(faults, checkpoint.path)


def check_no_damage(faults: Faults, place: object) -> None:
    """Refuses what contradicts a manifest.

    Raises:
        CorruptError: Lists everything that does.
    """
    faults.check(
        CorruptError,
        "The checkpoint isn't what was written: it is damaged, or was changed since",
        place=place,
        remedy=_REMEDY,
    )


def value_fault(tensor: Tensor, entry: Mapping[str, Any] | None, digest: str) -> str:
    """Compares a tensor's digest with its entry in a manifest; "" if it fits, or if there is none of its shape."""
    if entry is None or tensor_entry(tensor, entry["blake3"]) != entry or entry["blake3"] == digest:
        return ""
    return "has other values than when it was written"


def prove_files(
    checkpoint: Checkpoint, budget: Budget, tell: Callable[[str, int, int], object] = _nobody
) -> Faults:
    """Reads the files that opening compared in size only, and returns those that aren't what the manifest says.

    Args:
        checkpoint: An opened checkpoint.
        budget: The job's.
        tell: Gets the name of each file that has been read, and how many bytes of how many are done.
    """
    with proving_files(checkpoint, budget, tell) as faults:
        return faults({})


ProveFiles: TypeAlias = Callable[[Mapping[str, str]], Faults]
"""Gives the files that aren't what a manifest says, from the digests of tensors that were read meanwhile, by name."""


def _none_wrong(digests: Mapping[str, str]) -> Faults:
    """Finds nothing wrong."""
    return Faults()


def _proving_inside(checkpoint: Checkpoint, proof: Proof, budget: Budget) -> Iterator[ProveFiles]:
    """Does what `proving_files` does for one file that has its manifest inside."""
    known_faults = {(finding.what, finding.place) for finding in checkpoint.findings}
    with Files(budget, checkpoint.path) as files:
        leaves = leaves_in(proof.manifest.get(REST, {}))
        file, passing = files.source(proof.place), Passing(_apart(proof), leaves)

        def compare(digests: Mapping[str, str]) -> Faults:
            passing.tensors.update(digests)
            faults = _rest_faults(proof, file, partial(whole_file_fault, passing=passing))
            return Faults(fault for fault in faults if fault not in known_faults)

        with passing.read(file):
            yield compare if file.size > SMALL_BYTES else _none_wrong


@contextmanager
def proving_files(
    checkpoint: Checkpoint, budget: Budget, tell: Callable[[str, int, int], object] = _nobody
) -> Iterator[ProveFiles]:
    """Proves files as `prove_files` does, but reuses the bytes that are read in its context for other purposes.

    Args:
        checkpoint: An opened checkpoint.
        budget: The job's.
        tell: As in `prove_files`.

    Yields:
        A function that returns the files that differ from the manifest. It reads the bytes that weren't read in the
        context, and takes the digests of the tensors that were.
    """
    proof, done = checkpoint.proof, 0
    if proof is None:
        yield _none_wrong
        return
    if proof.is_inside:
        yield from _proving_inside(checkpoint, proof, budget)
        return
    damaged = {finding.place for finding in checkpoint.findings if finding.damage}
    large = [
        path
        for path, entry in proof.files.items()
        if entry["bytes"] > SMALL_BYTES and f"{path}" not in damaged
    ]
    total = sum(proof.files[path]["bytes"] for path in large)

    def count(path: Place) -> None:
        nonlocal done
        done += proof.files[path]["bytes"]
        tell(path.name, done, total)

    with Files(budget, checkpoint.path) as files, ExitStack() as stack:
        passings = dict[Hashable, Passing]()
        for path in large:
            with suppress(StatekitError):  # which comparing it says
                file = files.source(path)
                if file.identity not in passings:  # a file may have several names
                    passing = passings[file.identity] = Passing((), leaves_in(proof.files[path]))
                    stack.enter_context(passing.read(file))

        def digest(file: File, entry: Mapping[str, Any]) -> str:
            return digest_by(passings.get(file.identity), file, entry)

        def compare(digests: Mapping[str, str]) -> Faults:
            if proof.is_whole:  # otherwise tensors have other names in the manifest
                for passing in passings.values():
                    passing.tensors.update(digests)
            faults = file_faults(proof.files, proof.place, files, large, count, digest)
            return Faults((fault.what, f"{fault.path}") for fault in faults if f"{fault.path}" not in damaged)

        yield compare
