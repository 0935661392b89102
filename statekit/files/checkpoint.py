"""A checkpoint as it lies in its files: native names and tensors, nothing said yet about optimizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any

from statekit.files.tree import Place
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree, going_over, tensor_names

ATTRIBUTES = "@"
"""Key in a tree under which formats that give attributes to groups (HDF5) keep those of a group."""
SEQUENCES_AS_MAPS = "sequences_as_maps"
"""Key in `Checkpoint.meta` of containers that keep a sequence as a map with the keys "0", "1", ... and None as {}."""
VARIABLES = "variables"
"""Key in `Checkpoint.meta` of the parts whose arrays each lay under `value`, which their names are without.

A part is an item, a key at the top, or an item and a key; "" is the whole tree."""
EMPTY_LEFT_OUT = "empty_left_out"
"""Key in `Checkpoint.meta` of containers whose programs leave out nodes that hold nothing, and their keys."""

PRETRAINED = "pretrained"
"""Key beside a model of the files that its library builds it from, as a map made them: name -> JSON."""
FILES_BESIDE = "files_beside"
"""Key in `Checkpoint.meta` and in a state's `extra`: names of a step's files that don't belong to its arrays."""

STEPS = "steps"
"""Key in `Checkpoint.meta`: the steps that lie in the run's folder, this one among them."""

SORTED = "model_sorted"
"""Key in `Checkpoint.meta`: whether the model part is sorted by name, and not in the order of its parameters."""

OPTIMIZER_NAME = "optimizer_name"
"""Key in `Checkpoint.meta`: what a configuration beside the state calls the optimizer."""

CLASSES = "classes"
"""Key in `Checkpoint.meta`: names in a torch file's pickle that `torch.load(weights_only=True)` refuses."""

HALVES = "halves"
"""Key in `Checkpoint.meta`: the files of a folder that are one checkpoint, each by the name of its part.

A part "" is all of it; a name with `RANK` in it is that of the files of all ranks."""
RANK = "{rank}"
REPLICAS = "replicas"
"""Key in `Checkpoint.meta`: names of files of other ranks that have the same values."""

RANK_WORDS = "rank|gpu|device|process|proc|worker|host|node|shard|part|tp|pp|mp|consolidated"
"""Words before a rank's number in names of files.

Source: facebookresearch/fairseq fairseq/checkpoint_utils.py, `save_checkpoint` (shard0); meta-llama/llama
llama/generation.py, `Llama.build` (consolidated.00.pth); volcengine/verl (rank_0).
"""
_MAY_BE_RANK = re.compile(rf"(?<![a-z])(?:{RANK_WORDS})[-_.]{{0,2}}\d|[-_.]of[-_.]", re.IGNORECASE)


def may_be_of_rank(path: Place) -> bool:
    """Tells whether a path may be a rank's, as its name or its folder's has a word for ranks; ranks.py knows more."""
    return any(_MAY_BE_RANK.search(name) for name in (path.name, path.parent.name))


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
        kind: `absent` where values are made up because nothing is stored, `mixed` where files speak for different
            steps, or the name of another fault; "" of a remark.
    """

    what: str
    place: str
    damage: bool = False
    kind: str = ""


@dataclass(frozen=True)
class Proof:
    """A manifest, and its entries of one checkpoint (statekit/files/integrity.py).

    Attributes:
        place: The manifest's file; the checkpoint's own, if the manifest stands inside.
        manifest: The manifest.
        files: Size and digest of the checkpoint's files, by path; none of a file that has the manifest inside.
        tensors: Shape, dtype and digest of its tensors, by native name.
        is_whole: Whether the manifest is about the checkpoint, and not about one of which it is a part: then it has
            other names for the tensors, and `tensors` is empty.
        is_inside: Whether the manifest stands inside the checkpoint's file.
    """

    place: Place
    manifest: Mapping[str, Any]
    files: Mapping[Place, Mapping[str, Any]] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_whole: bool = True
    is_inside: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Opening parsed headers only; tensors read when asked.

    Attributes:
        container: Name of the container that opened it.
        path: The checkpoint itself (the step's folder, not the run's).
        tree: Everything in it, with Tensors at the leaves.
        meta: What the container knows besides: format version, generation, files.
        step: The step in the folder's name, if the container has one there.
        parts: Its files, where it is a file or several in a folder that may hold others; the first of them has its
            manifest beside. Empty if it is `path` and all below.
        findings: What was odd.
        proof: Its manifest, if there is one; a container finds one that stands inside its file, `proven` all others.
        manifest: The manifest, if what opening has looked at fits it: sizes, digests of small files, names, shapes and
            dtypes.
        is_numbered: Whether `step` is the step, and not a number at the end of a name, which may count something else.
        few_counts: Whether a layout reads the first and the last of its parameters' counts alone: each takes a request
            of a store.
    """

    container: str
    path: Place
    tree: Tree
    meta: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    findings: tuple[Finding, ...] = ()
    on_close: Callable[[], None] = field(default=lambda: None, repr=False)
    parts: tuple[Place, ...] = ()
    proof: Proof | None = None
    manifest: Mapping[str, Any] | None = None
    is_numbered: bool = True
    few_counts: bool = False

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
        with going_over(self.path):
            self.close()
            if isinstance(error, RecursionError):
                raise error
