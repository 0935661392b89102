"""Every checkpoint that a path means: one, or all steps of a run's folder, or all files of a folder of them.

What is done for each, and what is said of it, is a report of the path, of one shape whatever was done.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from statekit.budget import Budget
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Container
from statekit.conversion.target import source_container
from statekit.errors import BudgetError, StatekitError, UnknownFormatError, printable
from statekit.files.checkpoint import STEPS, Checkpoint
from statekit.files.source import listing
from statekit.files.tree import Place


@dataclass(frozen=True)
class OneReport:
    """What is said of one checkpoint.

    Attributes:
        path: The checkpoint.
        container: Its container's name.
        step: The step that it says it is.
        manifest: Where its manifest is; None if it has none.
    """

    path: Place
    container: str
    step: int | None
    manifest: Place | None

    def to_json(self) -> dict[str, Any]:
        manifest = None if self.manifest is None else str(self.manifest)
        return {"path": str(self.path), "container": self.container, "step": self.step, "manifest": manifest}


T = TypeVar("T", bound=OneReport)


@dataclass(frozen=True, repr=False)
class PathReport(Generic[T]):
    """What is said of the checkpoints at a path.

    Attributes:
        path: The path.
        checkpoints: Each of them, the oldest step first.
    """

    path: Place
    checkpoints: tuple[T, ...]

    def __repr__(self) -> str:
        return printable(f"<{type(self).__name__} {self.path}: {len(self.checkpoints)} checkpoints>")

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "checkpoints": [checkpoint.to_json() for checkpoint in self.checkpoints],
        }


_NUMBER = re.compile(r"[0-9]+\Z")


@dataclass(frozen=True)
class CheckpointAt:
    """Where a checkpoint is: a container, a path, and which step there if it has several."""

    container: Container
    ref: CheckpointRef

    @property
    def path(self) -> Place:
        """The checkpoint, or the run's folder."""
        return self.ref.place

    @property
    def step(self) -> int | None:
        """The step of the run's folder."""
        return self.ref.step

    def opened(self, budget: Budget | None = None) -> Checkpoint:
        """Opens it with what contradicts its manifest among its findings; raises as `registry.opened` does."""
        ref = replace(self.ref, accept_damaged=True)
        return registry.opened(self.container, self.path, self.step, ref, budget or ref.job_budget())


def _at(home: Container, ref: CheckpointRef, path: Place, step: int | None = None) -> CheckpointAt:
    return CheckpointAt(home, replace(ref, path=path, step=step, container=ref.container or home.name))


def checkpoints_at(ref: CheckpointRef) -> Iterator[CheckpointAt]:
    """Yields where each checkpoint at a path is, the oldest step first.

    Args:
        ref: A checkpoint, a run's folder, or a folder of files that are checkpoints; all steps if it names none.

    Raises:
        NotFoundError: Nothing is there.
        UnknownFormatError: No container fits, nor to anything in the folder.
    """
    path = ref.place
    if ref.container is not None:
        home = source_container(ref.container)[0]
    else:
        try:
            home, _ = registry.detect_container(path)
        except UnknownFormatError:
            inside = [path / name for name in registry.checkpoints_inside(path)] if path.is_dir() else []
            inside = inside or [
                folder for folder in _numbered_folders(path) if registry.checkpoints_inside(folder)
            ]
            if not inside:
                raise
            for entry in inside:
                yield from checkpoints_at(replace(ref, path=entry))
            return
    if ref.step is not None:
        yield _at(home, ref, path, ref.step)
        return
    yield from _steps(home, ref, path)


def _steps(home: Container, ref: CheckpointRef, path: Place) -> list[CheckpointAt]:
    """Returns each step of a run's folder, or the path itself; nothing of what was opened is held any more."""
    try:
        with _at(home, ref, path).opened() as newest:
            steps = [number for number in newest.meta.get(STEPS) or () if type(number) is int]
    except BudgetError:  # once more would take as much again
        raise
    except StatekitError:  # the newest is damaged, and says itself why; the others are found by their names
        return _numbered(home, ref, path)
    if len(steps) < 2:
        return [_at(home, ref, path)]
    return [_at(home, ref, path, number) for number in sorted(steps)]


def _numbered_folders(path: Place) -> list[Place]:
    """Returns the folders in a folder whose names end with a number, by this number."""
    folders = [entry for entry in listing(path) if entry.is_dir()] if path.is_dir() else []
    numbers = {entry: match for entry in folders if (match := _NUMBER.search(entry.name))}
    return sorted(numbers, key=lambda entry: (int(numbers[entry][0]), entry.name))


def _numbered(home: Container, ref: CheckpointRef, path: Place) -> list[CheckpointAt]:
    """Returns the folders in a run's folder that end with a number and are checkpoints; else the path itself."""
    steps = [folder for folder in _numbered_folders(path) if registry.fits(home, folder) is not None]
    return [_at(home, ref, folder) for folder in steps or [path]]
