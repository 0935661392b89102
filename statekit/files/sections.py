"""The sections of a target: files that a process writes by itself, in any order, beside other processes.

A container of many files says before a value is read which sections its target has. What it says depends on the
state and the cut alone, so that one process and many write the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, cast

from statekit.files.safetensors import open_safetensors, save_safetensors
from statekit.files.source import Files
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tensor import Tensor, nbytes
from statekit.tensors.typed import Natural, misfits


@dataclass(frozen=True)
class CutPoints:
    """Where a target of many files is cut: between tensors, never inside of one.

    Attributes:
        bytes: Bytes of tensors in a file at most, where a larger tensor has a file to itself; what the container
            does by itself if None.
    """

    bytes: int | None = None

    def limit(self, usual: int) -> int:
        """Returns the bytes of tensors in a file at most; `usual` is the container's own limit."""
        return usual if self.bytes is None else self.bytes


Rows: TypeAlias = list[tuple[Natural, Natural]]
"""A section's record that is a pair of whole numbers for each of its entries."""


@dataclass(frozen=True)
class Section:
    """Files of a target that a process writes by itself.

    Attributes:
        name: What it is called among the target's sections.
        tensors: Name in the target -> tensor: all whose values lie in it, in their order.
        write: Writes it into a stage; returns plain JSON that the container's `join` needs of it.
        read: Opens it below a path, by what `write` returned: its tensors by their names in the target.
        repeats: Whether writing it again gives the same files and bytes; of an OCDBT database it doesn't, so that the
            names of its files have `Stage.attempt`.
        record: The type of what `write` returns.
        rows: How long that is, if it is `Rows`.
        files: What the names of its files begin with; the section's name if none is given.
    """

    name: str
    tensors: Mapping[str, Tensor]
    write: Callable[[Stage], Any]
    read: Callable[[Place, Files, Any], Mapping[str, Tensor]]
    repeats: bool = True
    record: Any = None.__class__
    rows: int = 0
    files: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(map(nbytes, self.tensors.values()))

    def record_faults(self, record: object) -> list[tuple[str, str]]:
        """Returns what in a record from another process isn't what `write` returns, and where."""
        faults = [*islice(misfits(record, self.record, ("records", self.name)), 1)]
        if not faults and self.record is Rows and len(cast(Sized, record)) != self.rows:
            faults = [
                (f"has {len(cast(Sized, record))} entries, expected {self.rows}", f"records/{self.name}")
            ]
        return faults


def safetensors_section(
    file: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], named: Callable[[str], str] = str
) -> Section:
    """Returns a section that is a safetensors file; it gives `join` the digest of the file's header.

    Args:
        file: The file's name.
        tensors: By their names in the file.
        metadata: For the header.
        named: Gives a tensor's name in the target by its name in the file.
    """

    def stream(stage: Stage, name: str, tensor: Tensor) -> Iterator[memoryview]:
        return stage.stream(named(name), tensor)

    def write(stage: Stage) -> str:
        with stage.file(file) as output:
            return save_safetensors(
                tensors, output, lambda name, tensor: stream(stage, name, tensor), metadata
            )

    def read(path: Place, files: Files, record: Any) -> dict[str, Tensor]:
        opened = open_safetensors(path / file, files)
        return {named(name): tensor for name, tensor in opened.tensors.items()}

    shown = {named(name): tensor for name, tensor in tensors.items()}
    return Section(file, shown, write, read, record=str)
