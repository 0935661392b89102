"""Container `orbax`: checkpoints of Orbax, in every form that Orbax and T5X with it have written.

    <run>/<step>/_CHECKPOINT_METADATA, <item>/...    CheckpointManager; T5X: <run>/checkpoint_<step>/state/
    <anything>/_CHECKPOINT_METADATA, _METADATA, ...  StandardCheckpointer, PyTreeCheckpointer: the item itself

A step with one item gives that item's tree, one with several a tree of items. What an item is made of is told in
`orbax_item`.
Source: google/orbax orbax/checkpoint/checkpoint_manager.py, path/step.py; T5X t5x/checkpoints.py,
`OrbaxCheckpointManagerInterface`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.containers.orbax.item import STRINGS, open_item
from statekit.converters.containers.orbax.writer import step_metadata, write_item
from statekit.converters.containers.steps.beside import step_checkpoint
from statekit.converters.containers.steps.find import (
    INDEX,
    METADATA,
    STEP_METADATA,
    find_step,
    is_item,
    items,
    says_t5x,
    sighted,
)
from statekit.converters.containers.steps.names import step_prefix
from statekit.converters.formats.zarr.stores import FolderStore, read_whole
from statekit.errors import FormatError
from statekit.files.checkpoint import Checkpoint
from statekit.files.manifest import MAX_BYTES, strict_json
from statekit.files.stage import Stage
from statekit.tensors.tree import Tree

_DEFAULT = "{step}/default"
"""Where CheckpointManager keeps the only item of a step."""

_HANDLERS = (
    "PyTreeCheckpointHandler",
    "StandardCheckpointHandler",
    "JsonCheckpointHandler",
    "PyTreeHandler",
)
"""Those whose items are trees of arrays, or JSON."""

_OWN_FILES = {
    METADATA,
    STEP_METADATA,
    INDEX,
    STRINGS,
    "_sharding",
    "commit_success.txt",
    "orbax.checkpoint",
    "manifest.ocdbt",
    "d",
    "array_metadatas",
}


@dataclass(frozen=True)
class OrbaxFolder:
    """Orbax checkpoints with zarr arrays of format 2 or 3, in folders or in an OCDBT database."""

    name: str = "orbax"
    title: str = "Orbax checkpoint folders: one or several items, zarr 2 or 3, OCDBT or not, msgpack"
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = "folder"

    def detect(self, path: Path) -> Evidence | None:
        """Looks at file names and first bytes only."""
        if (found := sighted(path, "orbax")) is None:
            return None
        for item in _items(found.path):
            if says_t5x(item):
                return Evidence(20, f"{item} is an Orbax item that holds a T5X train state")
        return Evidence(10, f"{found.path} has the files of an Orbax checkpoint")

    def open(self, path: Path, step: int | None = None) -> Checkpoint:
        """Parses the trees and the arrays' headers.

        Raises:
            NotFoundError: No checkpoint, or no such step.
            FormatError: Trees or headers don't follow the format or can't be trusted.
        """
        found = find_step(path, step, "orbax")
        folders = _items(found.path)
        if not folders:
            raise FormatError(
                "An Orbax checkpoint holds no tree of arrays.",
                place=found.path,
                expected=f"an item with {METADATA}",
            )
        opened = {folder: open_item(folder) for folder in folders}
        _require_all(found.path, {folder.name for folder in folders})
        trees: dict[str, Tree] = {folder.name: item.tree for folder, item in opened.items()}
        tree = trees[folders[0].name] if len(folders) == 1 else trees
        known = set(_OWN_FILES) | {e.name for e in found.path.glob("ocdbt.process_*")}
        for folder, item in opened.items():
            known |= item.names if folder == found.path else {folder.name}
        meta = {
            "generation": "orbax",
            "items": [folder.name for folder in folders],
            "custom_metadata": {f.name: item.custom for f, item in opened.items() if item.custom is not None},
        }
        findings = tuple(finding for item in opened.values() for finding in item.findings)
        return step_checkpoint(self.name, found, tree, meta, known, findings)

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes the items of a step as Orbax does today: each an OCDBT database with its tree as JSON.

        Raises:
            UsageError: The target is named for another step, or the tree holds what Orbax can't.
            FormatError: Two names give the same array.
        """
        folder, _, item = (encoded.place or _DEFAULT).partition("/")
        prefix = step_prefix(stage, encoded.step, folder)
        begun = time.time_ns()
        if item == "{item}":
            handlers = {
                name: write_item(stage, f"{prefix}{name}", tree, f"{name}/")
                for name, tree in encoded.tree.items()
            }
        else:
            handlers = {item: write_item(stage, f"{prefix}{item}", encoded.tree)}
        with stage.file(f"{prefix}{STEP_METADATA}") as output:
            output.write(step_metadata(handlers, begun))


def _require_all(step: Path, found: set[str]) -> None:
    """Raises FormatError if a step says that it has an item which isn't there."""
    stated = FolderStore.of(step).value(STEP_METADATA)
    document = None if stated is None else strict_json(read_whole(stated, MAX_BYTES), stated.place)
    handlers = document.get("item_handlers") if isinstance(document, dict) else None
    if isinstance(handlers, dict):
        told = {name for name, kind in handlers.items() if str(kind).endswith(_HANDLERS)}
        if missing := sorted(told - found):
            raise FormatError(
                "An Orbax checkpoint lacks items that it says it has.",
                place=step,
                expected=", ".join(missing),
                found=", ".join(sorted(found)),
                remedy=f"copy the step again; what was deleted on purpose has to go from {STEP_METADATA} too",
            )


def _items(step: Path) -> list[Path]:
    return [step] if is_item(step) else items(step)


CONTAINER = OrbaxFolder()
