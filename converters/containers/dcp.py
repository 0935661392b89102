"""Container `dcp`: the folders of torch.distributed.checkpoint, as one process or any number of ranks wrote them.

It joins what ranks hold in pieces, and writes as one process would. Input: a checkpoint's folder, or a run's:

    .metadata          what there is, and in which piece of which file it lies: a pickle
    __<rank>_<n>.distcp    the pieces, one after the other, each a file of torch.save by itself

Output: the tree that was saved: a dict or list of it is a dict or list again, as the planner noted it, and a state
that was flattened before keeps its flat names. Tensors are joined from the boxes of all ranks: DTensors, ShardedTensors
of FSDP, Megatron-Core's.
Source: pytorch/pytorch torch/distributed/checkpoint/filesystem.py, default_planner.py, _nested_dict.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence, write_cut
from statekit.converters.containers.step_folders import check_step, files_beside
from statekit.converters.formats.dcp.metadata import METADATA, StoredContents, read_metadata
from statekit.converters.formats.dcp.tree import tree_of
from statekit.converters.formats.dcp.values import read_values
from statekit.converters.formats.dcp.writer import DcpFolder
from statekit.converters.formats.pytorch.reader import named
from statekit.errors import NotFoundError
from statekit.files.checkpoint import FILES_BESIDE, STEPS, Checkpoint, Finding
from statekit.files.sections import CutPoints, Section
from statekit.files.source import Files, listing, opening, read_small
from statekit.files.stage import Stage
from statekit.files.tree import Place, absolute
from statekit.tensors.tree import Tree

_STEP = re.compile(r"(?:.*[^0-9])?(\d{1,18})", re.DOTALL)


@dataclass(frozen=True)
class Folder:
    """An opened folder of pieces: where it is, what it holds, the same by path, what was odd, and its open files."""

    path: Place
    contents: StoredContents
    values: Mapping[str, Tree]
    findings: tuple[Finding, ...]
    files: Files

    def checkpoint(
        self, container: str, tree: Tree, step: int | None, steps: Sequence[int], others: Iterable[str] = ()
    ) -> Checkpoint:
        """Returns the checkpoint that the folder is, with what lies around its tensors.

        Args:
            container: Name of the container.
            tree: What it holds.
            step: The number in its name.
            steps: Those of the run's folder.
            others: Names of the container's files that aren't the folder's own.
        """
        notes = [Finding(note, f"{self.path / METADATA}") for note in self.contents.notes]
        other_files = files_beside(self.path, self._names | {*others}, self.files)
        meta = {**self._meta, STEPS: steps, FILES_BESIDE: other_files}
        findings = (*notes, *self.findings)
        return Checkpoint(
            container, self.path, named(tree), meta, step, findings, self.files.close, is_numbered=False
        )

    @property
    def _names(self) -> set[str]:
        """The names of the folder's own files."""
        pieces = [chunk.piece for entry in self.contents.tensors.values() for chunk in entry.chunks]
        return {METADATA, *(piece.file for piece in [*pieces, *self.contents.objects.values()])}

    @property
    def _meta(self) -> dict[str, Any]:
        """What is known of the folder besides its tree."""
        chunks = [len(entry.chunks) for entry in self.contents.tensors.values()]
        return {
            "version": self.contents.version,
            "files": len(self._names) - 1,
            "parts": sum(chunks),
            "cut": sum(count > 1 for count in chunks),
            "objects": len(self.contents.objects),
        }


def open_folder(path: Place, files: Files) -> Folder:
    """Opens the pieces of a folder.

    Raises:
        NotFoundError: A file isn't there.
        FormatError: Metadata or pieces don't follow the format or can't be trusted.
    """
    place = path / METADATA
    contents = read_metadata(read_small(place, files), f"{place}", files.account)
    return Folder(path, contents, *read_values(contents, path, files), files)


def steps_below(run: Place, mark: str) -> dict[int, Place]:
    """Returns the folders of a run that hold a file of this name, by the number their own name ends with."""
    return dict(sorted(_steps_below(run, mark))) if run.is_dir() else {}


def _steps_below(run: Place, mark: str) -> Iterator[tuple[int, Place]]:
    for entry in listing(run):
        match = _STEP.fullmatch(entry.name)
        if match and (entry / mark).is_file():
            yield int(match[1]), entry


def step_folder(path: Place, step: int | None, mark: str, what: str) -> tuple[Place, int | None, list[int]]:
    """Finds a checkpoint: the folder itself, or of a run's folder the newest step or the given one.

    Args:
        path: The folder.
        step: The step that is asked for.
        mark: A file that each checkpoint has.
        what: What it is called.

    Returns:
        The checkpoint's folder, the number in its name, and those of all steps beside it if a run was named.

    Raises:
        NotFoundError: There is none, or no such step.
    """
    path = absolute(path)
    if (path / mark).is_file():
        match = _STEP.fullmatch(path.name)
        number = int(match[1]) if match else None
        check_step(step, number, path)
        return path, number, []
    folders = steps_below(path, mark)
    if not folders or (step is not None and step not in folders):
        raise NotFoundError(
            f"There is no {what}." if step is None else "There is no such step.",
            place=path,
            expected=step,
            found=", ".join(map(str, folders)) or "none at all",
        )
    number = max(folders) if step is None else step
    return folders[number], number, list(folders)


@dataclass(frozen=True)
class Dcp:
    """The folders of torch.distributed.checkpoint."""

    name: str = "dcp"
    title: str = "folders of torch.distributed.checkpoint: one process, FSDP, DTensors of any number of ranks"
    suffixes: tuple[str, ...] = (".dcp",)
    target_kind: Literal["file", "folder"] | None = "folder"
    entries: tuple[str, ...] = (METADATA,)

    def detect(self, path: Place) -> Evidence | None:
        """Looks for `.metadata` beside files of pieces, here or in a run's steps."""
        for folder in [path, *reversed(steps_below(path, METADATA).values())]:
            if (folder / METADATA).is_file() and listing(folder, ".distcp"):
                return Evidence(10, f"{folder} has {METADATA} and *.distcp")
        return None

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Reads the metadata and what is no tensor; values of tensors are read when asked for."""
        place, number, steps = step_folder(path, step, METADATA, "checkpoint of torch.distributed.checkpoint")
        with opening(path, budget) as files:
            folder = open_folder(place, files)
            tree = tree_of(folder.contents.paths, folder.values, f"{place / METADATA}", files.account)
            return folder.checkpoint(self.name, tree, number, steps)

    def fitted(self, encoded: Encoded) -> Encoded:
        """Returns a state whose parameters are by name, as torch.distributed.checkpoint.state_dict gathers them."""
        return encoded.by_name or encoded

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes a folder that `torch.distributed.checkpoint.load` reads."""
        write_cut(self, encoded, stage)

    def image(self, encoded: Encoded, target: Place, cut: CutPoints) -> list[Section]:
        """Returns the files of pieces."""
        return DcpFolder(encoded.tree).image(cut)

    def join(self, encoded: Encoded, stage: Stage, cut: CutPoints, records: Mapping[str, Any]) -> None:
        """Writes the metadata."""
        DcpFolder(encoded.tree).join(stage, cut, records)


CONTAINER = Dcp()
