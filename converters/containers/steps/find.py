"""Finds the checkpoint of one step: in its own folder, or among the steps of a run's folder.

Source: T5X t5x/checkpoints.py, `get_local_data`, `latest_step`; orbax/checkpoint/path/step.py.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from statekit.errors import FormatError, NotFoundError
from statekit.files.checkpoint import Finding

Kind: TypeAlias = Literal["legacy", "orbax", "flax"]
"""Who wrote a step: T5X before Orbax (msgpack with zarr folders), Orbax, or Flax (a msgpack file)."""

INDEX = "checkpoint"
"""The msgpack file of a legacy checkpoint, and of Orbax items before OCDBT."""
METADATA = "_METADATA"
STEP_METADATA = "_CHECKPOINT_METADATA"
DATABASE = "manifest.ocdbt"
JSON_ITEM = "metadata"
"""The file of an Orbax item that is a JSON document, such as a data iterator's state."""
STATE = "state"
"""The item in which T5X keeps a train state."""

_KINDS: dict[Kind, tuple[str, str]] = {
    "legacy": ("T5X checkpoint of the legacy generation", "t5x"),
    "orbax": ("checkpoint of Orbax", "orbax"),
    "flax": ("msgpack file of Flax", "flax"),
}
"""What each kind is called, and the container that reads it."""

_STEP = re.compile(r"(?:.*_)?(\d+)", re.DOTALL)
_UNFINISHED = re.compile(r".*\.(tmp-|orbax-checkpoint-tmp).*", re.DOTALL)
_HEAD = 2**16
_LEGACY_KEYS = (b"version", b"optimizer")
_PLACEHOLDERS = (b"PLACEHOLDER://", b"AGGREGATED://")


@dataclass(frozen=True)
class StepFolder:
    """One step's checkpoint.

    Attributes:
        path: Its folder, or the file where the checkpoint is a single one.
        kind: Who wrote it.
        step: The number in its name, if it has one.
        findings: Newer steps that were passed over.
        steps: The numbers of all steps in the run's folder, if that was looked at.
    """

    path: Path
    kind: Kind
    step: int | None
    findings: tuple[Finding, ...] = ()
    steps: tuple[int, ...] = ()


def locate(path: Path, step: int | None = None) -> StepFolder | None:
    """Finds the checkpoint at a path: itself, or of a run's folder the newest step or the given one.

    Returns:
        None if there is nothing of the kind.

    Raises:
        NotFoundError: The given step isn't there, or isn't finished.
    """
    path = Path(os.path.abspath(path))
    if _UNFINISHED.fullmatch(path.name):
        raise FormatError(
            "This checkpoint wasn't finished.",
            place=path,
            expected="a folder that was renamed when all was written",
            remedy="take an older step; rename it only if you know that it is complete",
        )
    kind = kind_of(path)
    if kind is not None:
        number = step_number(path)
        if step is not None and step != number:
            raise NotFoundError(
                "This is the checkpoint of one step, and of another.", place=path, expected=step, found=number
            )
        return StepFolder(path, kind, number)
    return _among(path, step) if path.is_dir() else None


def sighted(path: Path, kind: Kind) -> StepFolder | None:
    """Returns the checkpoint of one generation at a path, as `locate` finds it; None where it finds no such."""
    try:
        found = locate(path)
    except FormatError:
        return None
    return found if found is not None and found.kind == kind else None


def find_step(path: Path, step: int | None, kind: Kind) -> StepFolder:
    """Finds the checkpoint of one generation at a path, as `locate` does.

    Raises:
        NotFoundError: There is none, or it is of the other generation; or no such step.
    """
    found = locate(path, step)
    if found is None or found.kind != kind:
        raise NotFoundError(
            f"There is no {_KINDS[kind][0]}.",
            place=path if found is None else found.path,
            found=None if found is None else f"a {_KINDS[found.kind][0]}",
            remedy="" if found is None else f"read it with --from {_KINDS[found.kind][1]}",
        )
    return found


def _among(run: Path, step: int | None) -> StepFolder | None:
    found = {n: entry for entry in sorted(run.iterdir()) if (n := step_number(entry)) is not None}
    passed: list[Finding] = []
    for number in sorted(found, reverse=True) if step is None else [step]:
        kind = kind_of(found[number]) if number in found else None
        if kind is not None:
            return StepFolder(found[number], kind, number, tuple(passed), tuple(sorted(found)))
        if step is not None:
            kinds = [str(n) for n in sorted(found) if kind_of(found[n]) is not None]
            raise NotFoundError(
                "There is no such step.", place=run, expected=step, found=", ".join(kinds) or "no step at all"
            )
        passed.append(Finding("holds no checkpoint, passed over", str(found[number])))
    return None


def step_number(path: Path) -> int | None:
    """Returns the step in a folder's name, such as 1000 of `checkpoint_1000`; None if it has none or isn't finished."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and len(match[1]) < 20 else None


def kind_of(path: Path) -> Kind | None:
    """Looks at names and first bytes to tell who wrote a step's folder or file; None if it's none of these."""
    if path.is_file():
        head = _head(path)
        return "legacy" if _is_legacy(head) else "flax" if _is_map(head) and _begins_with_name(head) else None
    if not path.is_dir():
        return None
    if is_item(path):
        return "orbax"
    if _is_legacy(_head(path / INDEX)):
        return "legacy"
    return "orbax" if (path / STEP_METADATA).is_file() or items(path) else None


def is_item(folder: Path) -> bool:
    """Tells whether a folder is an Orbax item: a tree of arrays."""
    if any((folder / name).is_file() for name in (METADATA, DATABASE)):
        return True
    head = _head(folder / INDEX)
    return _is_map(head) and any(mark in head for mark in _PLACEHOLDERS)


def items(step: Path) -> list[Path]:
    """Returns the folders of the Orbax items in a step's folder: trees, and JSON documents beside one."""
    folders = sorted(entry for entry in step.iterdir() if entry.is_dir())
    named = [f for f in folders if step_number(f) is None and not _UNFINISHED.fullmatch(f.name)]
    trees = [f for f in named if is_item(f) or (f.name == STATE and _is_map(_head(f / INDEX)))]
    return [f for f in named if f in trees or (trees and (f / JSON_ITEM).is_file())]


def says_t5x(item: Path) -> bool:
    """Tells whether an Orbax item's tree is a T5X train state, by the names at its beginning."""
    return any(
        mark in _head(item / name) for name in (METADATA, INDEX) for mark in (b"param_states", b"_optimizer")
    )


def _head(path: Path) -> bytes:
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD)
    except OSError:
        return b""


def _is_map(head: bytes) -> bool:
    """Tells whether bytes begin a msgpack map with entries; TensorFlow's file of the same name is text."""
    return bool(head) and (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF))


def _is_legacy(head: bytes) -> bool:
    return _is_map(head) and any(_first_key(head) == bytes([0xA0 + len(key)]) + key for key in _LEGACY_KEYS)


def _begins_with_name(head: bytes) -> bool:
    """Tells whether a map's first key is a short name: other files begin with the byte of a map by chance."""
    key = _first_key(head)
    return len(key) > 1 and key[1:].isascii() and key[1:].decode("ascii", "replace").isprintable()


def _first_key(head: bytes) -> bytes:
    """Returns the first key of a map with its length before it, if it's a name of up to 31 bytes; else nothing."""
    start = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
    size = head[start] - 0xA0 if len(head) > start else -1
    return head[start : start + 1 + size] if 0 < size < 32 else b""
