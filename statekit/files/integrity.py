"""The one verdict on a checkpoint's integrity: is it what its manifest says?

A container hands over what it opened. Beside it or inside it may lie a manifest; what contradicts one that is about
these very files is damage. Whoever opens the checkpoint refuses that (`check_undamaged`), unless the user has asked to
go on. Opening compares sizes, small files, names, shapes and dtypes; `prove_files` reads what else the manifest names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statekit.errors import CorruptError, Faults, StatekitError
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.files.manifest import (
    FILE,
    SMALL_BYTES,
    check_inside,
    file_faults,
    parse,
    tensor_faults,
    unnamed_files,
)
from statekit.files.source import Files, read_small
from statekit.tensors.tensor import Tensor

_REMEDY = (
    "restore the checkpoint from a copy; --accept-damaged (in Python accept_damaged=True) goes on with what is there, "
    "without the manifest"
)


def _nobody(name: str, done: int, total: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Proof:
    """What a manifest says of a checkpoint.

    Attributes:
        manifest: The manifest, if there is one and nothing looked at so far contradicts it.
        findings: What contradicts it, as damage; and what lies beside the files that it names.
        folder: Where the manifest lies, and the files that it names; None if it stands inside the checkpoint's file.
    """

    manifest: Mapping[str, Any] | None = None
    findings: tuple[Finding, ...] = ()
    folder: Path | None = None


def proof_beside(
    path: Path,
    tensors: Mapping[str, Tensor],
    files: Files,
    step: int | None = None,
    others: Iterable[Path] = (),
) -> Proof:
    """Returns the proof of a checkpoint by the `statekit.json` in its folder or, failing that, in the run's.

    In a run's folder only the checkpoint's own files count: the run goes on to write others, and removes old ones. A
    manifest that names none of them is another checkpoint's.

    Args:
        path: The checkpoint's folder, or its file.
        tensors: Every tensor in it, by name.
        files: Its open files, whose budget holds the manifest.
        step: The step that the checkpoint itself says, in its name or within; None if its format says none.
        others: Where it is a file: its other files, in the same folder.
    """
    for folder in (path, path.parent) if path.is_dir() else (path.parent,):
        place = folder / FILE
        if not place.exists():
            continue
        try:
            manifest = parse(read_small(place, files), place)
            check_inside(folder, manifest)
        except StatekitError as error:
            return Proof(None, (Finding(f"the manifest isn't trusted: {error.line}", f"{place}", True),))
        entries = manifest["files"]
        if folder != path:
            names = {path.name, *(file.name for file in others)}
            entries = {name: entry for name, entry in entries.items() if name.partition("/")[0] in names}
            if not entries:
                continue
        stated = manifest["target"].get("step")
        faults = [(what, f"{folder / name}") for what, name in file_faults(folder, entries, files)]
        faults += tensor_faults(manifest, tensors)
        if None not in (step, stated) and step != stated:
            faults.append((f"is of step {step}, in the manifest {stated}", f"{path}"))
        if faults:
            return Proof(None, _damage(faults), folder)
        unnamed = unnamed_files(path, manifest) if folder == path else []
        findings = (Finding("the manifest doesn't name this file", f"{folder / name}") for name in unnamed)
        return Proof(manifest, tuple(findings), folder)
    return Proof()


def proof_inside(text: str, tensors: Mapping[str, Tensor], path: Path) -> Proof:
    """Returns the proof of a checkpoint that is one file, by the manifest inside it."""
    try:
        manifest = parse(text, path)
    except StatekitError as error:
        return Proof(None, (Finding(f"the manifest inside isn't trusted: {error.line}", f"{path}", True),))
    damage = _damage(tensor_faults(manifest, tensors))
    return Proof(None, damage) if damage else Proof(manifest)


def check_undamaged(checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint that its manifest contradicts, as far as opening has looked.

    Raises:
        CorruptError: Lists everything that does.
    """
    faults = Faults((finding.what, finding.place) for finding in checkpoint.findings if finding.damage)
    if checkpoint.manifest is not None:  # not every container asks for a proof
        faults += tensor_faults(checkpoint.manifest, checkpoint.tensors)
    check_no_damage(faults, checkpoint.path)


def check_no_damage(faults: Faults, place: object) -> None:
    """Refuses what contradicts a manifest.

    Raises:
        CorruptError: Lists everything that does.
    """
    faults.check(
        CorruptError,
        "The checkpoint isn't what its manifest says: damaged, or changed since it was written",
        place=place,
        remedy=_REMEDY,
    )


def prove_files(checkpoint: Checkpoint, tell: Callable[[str, int, int], object] = _nobody) -> Faults:
    """Reads the files that opening compared in size only, and returns those that aren't what the manifest says.

    Args:
        checkpoint: An opened checkpoint.
        tell: Gets the name of each file that has been read, and how many bytes of how many are done.
    """
    faults, done = Faults(), 0
    folder = checkpoint.manifest_folder
    entries = checkpoint.manifest["files"] if checkpoint.manifest and folder else {}
    large = {name: entry for name, entry in entries.items() if entry["bytes"] > SMALL_BYTES}
    total = sum(entry["bytes"] for entry in large.values())
    for name, entry in large.items():
        assert folder is not None
        faults += ((what, f"{folder / name}") for what, _ in file_faults(folder, {name: entry}, whole=True))
        done += entry["bytes"]
        tell(name, done, total)
    return faults


def _damage(faults: Iterable[tuple[str, str]]) -> tuple[Finding, ...]:
    return tuple(Finding(what, place, True) for what, place in faults)
