"""The tasks of a work: runs of a target's sections to write, and what of the source is only to be proven."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from statekit.files.safetensors import sharded
from statekit.files.sections import Section
from statekit.tensors.tensor import Tensor, nbytes

MEMORY = 2**30
"""Bytes of memory that a task takes at most: values stream, and headers are bounded by the job's budget."""


@dataclass(frozen=True)
class Task:
    """A part of a work that a process does by itself.

    Attributes:
        number: From 0 on.
        kind: `write` sections of the target, or `check` tensors or files of the source that nobody writes as they are.
        names: The sections; or the source's tensors; or its files, each of which begins with `file:`.
        bytes: Bytes of values.
        memory: Bytes of memory that it takes at most.
    """

    number: int
    kind: Literal["write", "check"]
    names: tuple[str, ...]
    bytes: int
    memory: int = MEMORY

    def to_json(self) -> list[Any]:
        """Returns it as it stands in a work's document: a worker makes the names anew."""
        return [self.kind, self.bytes, len(self.names)]


FILE = "file:"
"""What the name of a file begins with among those of a task."""


def tasks_of(
    sections: Sequence[Section], rest: Mapping[str, Tensor], files: Mapping[str, int], task_bytes: int
) -> tuple[Task, ...]:
    """Returns the tasks of a work.

    Args:
        sections: Those of the target.
        rest: Tensors of the source that aren't written as they are, by name.
        files: Files of the source that its manifest has the digest of: name -> bytes.
        task_bytes: Bytes of a task at most, unless a section, a tensor or a file has more.
    """
    runs = [*_runs("write", {section.name: section.bytes for section in sections}, task_bytes)]
    runs += _runs("check", {name: nbytes(tensor) for name, tensor in rest.items()}, task_bytes)
    runs += _runs("check", {f"{FILE}{name}": size for name, size in files.items()}, task_bytes)
    return tuple(Task(number, kind, names, size) for number, (kind, names, size) in enumerate(runs))


def _runs(
    kind: Literal["write", "check"], sizes: Mapping[str, int], limit: int
) -> Iterator[tuple[Literal["write", "check"], tuple[str, ...], int]]:
    for run in sharded(sizes, limit, int):
        yield kind, tuple(run), sum(run.values())
