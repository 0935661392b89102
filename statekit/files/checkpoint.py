"""A checkpoint as it lies in its files: native names and tensors, nothing said yet about optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree, tensor_names

ATTRIBUTES = "@"
"""Key in a tree under which formats that give attributes to groups (HDF5) keep those of a group."""
SEQUENCES_AS_MAPS = "sequences_as_maps"
"""Key in `Checkpoint.meta` of containers that keep a sequence as a map with the keys "0", "1", ... and None as {}."""

FILES_BESIDE = "files_beside"
"""Key in `Checkpoint.meta` and in a state's `extra`: names of a step's files that don't belong to its arrays."""

SORTED = "model_sorted"
"""Key in `Checkpoint.meta`: whether the model part is sorted by name, and not in the order of its parameters."""

MODEL_KEY, OPTIMIZER_KEY = "model_key", "optimizer_key"
"""Keys in `Checkpoint.meta`: paths of these parts in the tree, keys joined by `/`, where the user named them."""


@dataclass(frozen=True)
class Finding:
    """Something odd that a reader met and carried on from, such as a chunk that is absent and reads as fill.

    Attributes:
        what: What is odd.
        place: Where.
        damage: Whether it contradicts the checkpoint's manifest: whoever opens it decides whether to go on
            (statekit/files/integrity.py).
    """

    what: str
    place: str
    damage: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Opening parsed headers only; tensors read when asked.

    Attributes:
        container: Name of the container that opened it.
        path: The checkpoint itself (the step's folder, not the run's).
        tree: Everything in it, with Tensors at the leaves.
        meta: What the container knows besides: format version, generation, files.
        step: The step in the folder's name, if the container has one there.
        manifest: The `statekit.json` found with it, if sizes, digests of small files, names, shapes and dtypes fit.
        findings: What was odd.
        manifest_folder: Where the files lie that the manifest names; None if it stands inside the checkpoint's file.
    """

    container: str
    path: Path
    tree: Tree
    meta: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    manifest: Mapping[str, Any] | None = None
    findings: tuple[Finding, ...] = ()
    on_close: Callable[[], None] = field(default=lambda: None, repr=False)
    manifest_folder: Path | None = None

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its native name: the keys of its path in the tree, joined with `/`."""
        return tensor_names(self.tree)

    def close(self) -> None:
        """Closes the files behind the tensors."""
        self.on_close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
