"""Container `flax`: the msgpack files of Flax, alone or in the folder of a run.

It parses a file without its arrays, and writes one as Flax does. Input: a file, or of a run's folder the newest:

    <run>/checkpoint_<step>    flax.training.checkpoints, with flax_use_orbax_checkpointing=False
    <anything>.msgpack         flax.serialization.to_bytes, Hugging Face's Flax models

Output: the one map that it holds, arrays as tensors; numbers are tensors of rank 0 and written back as numbers.
Source: google/flax flax/serialization.py, `msgpack_serialize`; flax/training/checkpoints.py, `save_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.containers.step_folders import (
    FOLDER,
    find_step,
    named_for_step,
    sighted,
    step_checkpoint,
)
from statekit.converters.formats.flat_names import run_of_jax
from statekit.converters.formats.msgpack.reader import Inline, parse
from statekit.converters.formats.msgpack.writer import NUMBER, SCALAR, gathered, packed
from statekit.errors import FormatError, RefusedError
from statekit.files.checkpoint import EMPTY_LEFT_OUT, SEQUENCES_AS_MAPS, Checkpoint
from statekit.files.source import opening
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tensor import Stored, in_memory
from statekit.tensors.tree import Path as Keys
from statekit.tensors.tree import Tree, mapped

_ELSEWHERE = "//GDAPlaceholder:"
"""What stands for an array that several processes wrote into a folder beside the file."""


@dataclass(frozen=True)
class FlaxFile:
    """Flax' msgpack files."""

    name: str = "flax"
    title: str = "Flax msgpack: checkpoint_<step> files of a run, or a .msgpack file"
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = "folder"

    def detect(self, path: Place) -> Evidence | None:
        if (step_folder := sighted(path, "flax")) is None:
            return None
        return Evidence(10, f"{step_folder.path} is a msgpack map that begins with a name")

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Parses the map, skipping the values of arrays."""
        step_folder = find_step(path, step, "flax")
        with opening(path, budget) as files:
            source = files.source(step_folder.path)
            tree = with_tensors(parse(source), (), source.place)
            if not isinstance(tree, dict):
                raise FormatError(
                    "A Flax file holds no map.", place=step_folder.path, found=type(tree).__name__
                )
            meta = {"generation": "msgpack", SEQUENCES_AS_MAPS: True}
            if (flat := run_of_jax(tree, source.place)) is not None:
                tree, meta = flat, {**meta, EMPTY_LEFT_OUT: True}
            return step_checkpoint(self.name, step_folder, tree, meta, {step_folder.path.name}, (), files)

    def fitted(self, encoded: Encoded) -> Encoded:
        """Returns a state whose numbers are tensors, as they are when the file is read again."""

        def change(leaf: Tree) -> Tree:
            plain = isinstance(leaf, (bool, float)) or (isinstance(leaf, int) and -(2**63) <= leaf < 2**63)
            return _number(leaf) if plain else leaf

        return replace(encoded, tree=mapped(encoded.tree, change))

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes `checkpoint_<step>` as `flax.training.checkpoints` does."""
        # A run's folder is never named for another step than its own.
        named_for_step(stage.target, encoded.step, FOLDER)
        with stage.file(FOLDER.format(step=encoded.step)) as output:
            for block in gathered(packed(encoded.tree, stage)):
                output.write(block)


def _number(value: float, name: str = "", place: str = "") -> Stored:
    return replace(in_memory(np.asarray(value), name, place), note=NUMBER)


def with_tensors(node: Any, path: Keys, place: str) -> Tree:
    """Returns a parsed tree with tensors in the place of arrays and numbers."""
    children = (
        node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    )
    below = {}
    for key, child in children:  # a loop, because a comprehension costs a second stack frame for each level
        below[key] = with_tensors(child, (*path, key), place)
    if below:
        return below if isinstance(node, Mapping) else list(below.values())
    name = "/".join(map(str, path))
    if isinstance(node, Inline):
        return replace(node.tensor(name), note=SCALAR if node.scalar else "")
    if isinstance(node, Stored):
        return replace(node, name=name, note=NUMBER)  # a complex number
    if isinstance(node, (bool, int, float)):
        return _number(node, name, place)
    if isinstance(node, str) and node.startswith(_ELSEWHERE):
        raise RefusedError(
            "An array lies in a folder beside the file, which several processes wrote.",
            place=f"{name} in {place}",
            expected="arrays inside of the file",
            found=node[:200],
            remedy="restore it with Flax and save it with Orbax",
        )
    return node


CONTAINER = FlaxFile()
