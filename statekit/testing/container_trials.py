"""What the laws of containers are checked on: a system's own checkpoint, and what its format leaves open."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from statekit.budget import Budget
from statekit.conversion.contracts import Container, Encoded, Hints
from statekit.conversion.registry import opened
from statekit.files.checkpoint import Checkpoint
from statekit.files.stage import staged
from statekit.tensors.tree import Tree, to_json
from statekit.testing.damage import files_of

Values: TypeAlias = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""Name -> dtype, shape and bytes."""

FILES = 3
"""How many files are damaged for each place that is damaged in them."""


@dataclass(frozen=True)
class Sample:
    """A checkpoint that the original system wrote, and what its format leaves open.

    Attributes:
        container: Name of its container.
        path: The checkpoint.
        root: The folder that holds all its files, where that is more than `path`.
        unchecked: Globs of files in which a flipped bit may change what is read: the format has no checksum there.
        optional: Globs of files that a checkpoint of its kind may lack.
        plain: Whether values lie in the files as they do in memory, apart from all that opening reads.
        writes: What the container makes of the same tree: the `same` bytes again and again; the bytes of another
            library, which come `anew` each time; or `nothing`, as it can't write all that the sample holds.
        joint: Whether all tensors of a parameter must have one shape, so that none can be enlarged by itself.
    """

    container: str
    path: Path
    root: Path | None = None
    unchecked: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    plain: bool = True
    writes: Literal["same", "anew", "nothing"] = "same"
    joint: bool = False


@dataclass(frozen=True)
class WrittenContents:
    """All that a checkpoint holds."""

    values: Values
    view: Any
    findings: frozenset[str]

    @staticmethod
    def of(checkpoint: Checkpoint) -> WrittenContents:
        """Reads everything."""
        values = {
            name: (tensor.dtype.name, tensor.shape, tensor.read().tobytes())
            for name, tensor in checkpoint.tensors.items()
        }
        return WrittenContents(
            values, to_json(checkpoint.tree), frozenset(f.what for f in checkpoint.findings)
        )


def open_proven(container: Container, path: Path, budget: Budget | None = None) -> Checkpoint:
    """Opens a checkpoint; what contradicts its manifest, if there is one, is among its findings."""
    return opened(container, path, None, Hints(accept_damaged=True), budget)


@dataclass(frozen=True)
class Trial:
    """A container and a checkpoint of it.

    Attributes:
        container: The container.
        sample: A checkpoint.
        work: A folder for copies.
        peers: The containers that it is distinguished from.
        effort: How many of the sample's files are damaged, and at how many places each; 0 is all of them.
    """

    container: Container
    sample: Sample
    work: Path
    peers: tuple[Container, ...] = ()
    effort: int = 4

    @cached_property
    def root(self) -> Path:
        """A copy of all that the sample is made of."""
        original = self.sample.root or self.sample.path
        copy = self.work / "copy" / original.name
        copy.parent.mkdir()
        shutil.copytree(original, copy) if original.is_dir() else shutil.copy(original, copy)
        return copy

    @property
    def path(self) -> Path:
        """The checkpoint in the copy."""
        return self.root / self.sample.path.relative_to(self.sample.root or self.sample.path)

    @property
    def writes(self) -> bool:
        """Whether the sample can be written again."""
        return self.container.target_kind is not None and self.sample.writes != "nothing"

    @cached_property
    def contents(self) -> WrittenContents:
        """All that the sample holds."""
        return self.read()

    def read(self) -> WrittenContents:
        """Opens the copy and reads everything."""
        with open_proven(self.container, self.path) as checkpoint:
            return WrittenContents.of(checkpoint)

    @property
    def victims(self) -> list[Path]:
        """The files that are damaged: all, or as many as the effort allows, evenly spread."""
        files = files_of(self.root)
        few = FILES * self.effort
        return [files[i] for i in sorted({len(files) * k // few for k in range(few)})] if few else files

    def name_of(self, file: Path) -> str:
        """Returns the name of a file of the copy, as globs see it."""
        return file.relative_to(self.root).as_posix() if file != self.root else file.name

    def write(self, tree: Tree, step: int | None, folder: str) -> Path:
        """Writes a tree as a checkpoint of the container, and returns where."""
        (self.work / folder).mkdir()
        target = self.work / folder / f"written{next(iter(self.container.suffixes), '')}"
        assert self.container.target_kind is not None
        with staged(target, self.container.target_kind) as stage:
            self.container.write(Encoded(tree, step or 0), stage)
            stage.commit(self.container.open)
        return target
