"""What a scan asks of a file or folder: whether it is a checkpoint or a run, and what each of its checkpoints is."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.checkpoints_at import CheckpointAt, checkpoints_at
from statekit.conversion.inspection import Inspection, inspect
from statekit.errors import StatekitError, UnknownFormatError, printable
from statekit.files.checkpoint import Checkpoint
from statekit.files.file_changes import Change
from statekit.service.tasks.listener import Listener
from statekit.state.schema import NO_OPTIMIZER, WEIGHTS, is_native
from statekit.state.train_state import Optimizer
from statekit.tensors.digest import json_digest

_GREATEST = 2**63 - 1
_LINE = 200
MOST_SAID = 300
"""Characters of why no state is made of a checkpoint."""


def places(request: Mapping[str, Any], listener: Listener) -> dict[str, Any]:
    """Says which checkpoints a path is, and in which container.

    Returns:
        `recording`, of a folder whose files are no checkpoints; `container` and `places`, each with `path` and `step`;
        `unreadable`, of what is named as a checkpoint is and can't be read; or nothing.
    """
    path = Path(request["path"])
    hints = CheckpointRef(budget=request.get("budget"))
    try:
        container, _ = registry.detect_container(path)
    except UnknownFormatError as error:
        if path.is_dir() and _is_recording(path):
            return {"recording": True}
        is_named = path.is_file() and path.name.lower().endswith(registry.checkpoint_suffixes())
        return {"unreadable": error.subject} if is_named else {}
    except StatekitError as error:
        return {"unreadable": error.line}
    try:
        checkpoints = list(checkpoints_at(hints.at(path, container=container.name)))
    except StatekitError as error:
        return {"container": container.name, "unreadable": error.line}
    return {
        "container": container.name,
        "places": [{"path": str(place.path), "step": place.step} for place in checkpoints],
    }


def _is_recording(folder: Path) -> bool:
    """Tells whether a folder is a recording: its files are no checkpoints, but folders in it may be."""
    if not (folder / "trajectory.safetensors").is_file():
        return False
    from statekit.verify.recording import open_recording

    try:
        with open_recording(folder):
            return True
    except StatekitError:
        return False


def describe(request: Mapping[str, Any], listener: Listener) -> dict[str, Any]:
    """Says what one checkpoint is: the columns of its row, where it is, and which files are its parts."""
    hints = CheckpointRef(accept_damaged=True, budget=request.get("budget"))
    container = registry.container(request["container"])
    ref = hints.at(Path(request["path"]), container=container.name, step=request["step"])
    with CheckpointAt(container, ref).opened() as checkpoint:
        where = {"path": str(_file_of(checkpoint)), "parts": [str(part) for part in checkpoint.parts]}
        sealed, numbered = _sealed(checkpoint), checkpoint.step if checkpoint.is_numbered else None
    seen = inspect(ref)
    return {**where, **_columns(seen, numbered), **sealed}


def _file_of(checkpoint: Checkpoint) -> Path:
    """Returns where a checkpoint is; the first of its files, where its name is only what they begin with."""
    is_there = checkpoint.path.exists() or not checkpoint.parts
    return Path(checkpoint.path if is_there else checkpoint.parts[0])


def _columns(seen: Inspection, step: int | None) -> dict[str, Any]:
    totals, optimizer = seen.totals(), seen.optimizer
    is_run = optimizer is not None and optimizer.schema != WEIGHTS
    if step is None and seen.counts is not None and is_run:
        step = seen.counts.done
    return {
        "container": seen.container.name,
        "layout": seen.layout.name if seen.layout else None,
        "optimizer": "/".join(filter(None, [optimizer.schema, optimizer.variant]))
        if optimizer and is_run
        else None,
        "step": None if step is None or abs(step) > _GREATEST else step,
        "tensors": totals["parameters"] + totals["slots"] + totals["others"],
        "parameters": totals["parameters"],
        "elements": min(totals["elements"], _GREATEST),
        "undecoded": _why_no_run(seen),
        # Where numbers stand in the place of names, its own system goes on by them.
        "resumable": is_run
        and (bool(totals["slots"] or (seen.undecoded and seen.parameters)) or _may_lack_slots(optimizer)),
    }


def _why_no_run(seen: Inspection) -> str | None:
    """Returns why no state is made of a checkpoint, or what of its run isn't read; None where nothing is amiss."""
    why = seen.undecoded
    if why is None and seen.optimizer is None and seen.contents != NO_OPTIMIZER:
        why = seen.contents
    return None if why is None else textwrap.shorten(printable(why), MOST_SAID, placeholder=" ...")


def _may_lack_slots(optimizer: Optimizer | None) -> bool:
    """Tells whether an optimizer without a schema may be one that keeps nothing, such as plain SGD."""
    return optimizer is not None and is_native(optimizer.schema)


def _sealed(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns what a checkpoint's manifest says, and whether that fits."""
    damage = [finding.what for finding in checkpoint.findings if finding.damage]
    if damage:
        rewritten = all(
            Change.REWRITTEN.value in changes and Change.UNTOLD.value not in changes for changes in damage
        )
        return {"seal": "changed" if rewritten else "damaged"}
    proof = checkpoint.proof
    if proof is None:
        return {"seal": "unsealed"}
    if not proof.is_whole:
        return {"seal": "sealed"}
    manifest = proof.manifest
    source = manifest["source"]
    origin = {name: manifest[name] for name in ("source", "target", "options")}
    origin |= {name: _text(manifest.get(name)) for name in ("tool", "plan")}
    return {
        "seal": "sealed",
        "digest": json_digest(manifest["tensors"]),
        "made": origin if source.get("container") else None,
        "source_digest": _text(source.get("digest")),
    }


def _text(value: object) -> str | None:
    """Returns what a manifest has in a field that is a line of text; None of anything else, which no column takes."""
    return value if isinstance(value, str) and value.isascii() and len(value) <= _LINE else None


KINDS: Mapping[str, Callable[[Mapping[str, Any], Listener], Any]] = {"places": places, "describe": describe}
