"""The container `torch`: the files of `torch.save`, read without PyTorch and without running what they hold.

It reads both generations and writes the newer one, which `torch.load(weights_only=True)` takes. In goes a file; out
comes the object that was saved, tensors in it, objects of foreign classes as inert records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.formats.pytorch.reader import generation, named, read_object
from statekit.converters.formats.pytorch.writer import MANIFEST_KEY, write_torch
from statekit.errors import NotFoundError, StatekitError
from statekit.files.checkpoint import Checkpoint
from statekit.files.integrity import Proof, proof_inside
from statekit.files.source import Budget, Files, opening
from statekit.files.stage import Stage
from statekit.tensors.tree import tensor_names

"""Faults of a manifest that are named."""


@dataclass(frozen=True)
class TorchFile:
    """The container of `.pt`, `.pth`, `.bin` and `.ckpt` files, zip and legacy."""

    name: str = "torch"
    title: str = "PyTorch file (torch.save), zip or legacy"
    suffixes: tuple[str, ...] = (".pt", ".pth", ".bin", ".ckpt")
    target_kind: Literal["file", "folder"] | None = "file"
    keeps_manifest: bool = True

    def detect(self, path: Path) -> Evidence | None:
        """Looks at the first bytes, and at the directory at the end of a zip archive."""
        if not path.is_file():
            return None
        try:
            with Files() as files:
                kind = generation(files.source(path))
        except (OSError, StatekitError):
            return None
        return Evidence(10, _BECAUSE[kind]) if kind else None

    def open(self, path: Path, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Reads the pickle and the headers; values are read when asked for.

        Raises:
            NotFoundError: No such file, or a step is asked of it.
            RefusedError: The file calls for code, or asks for absurd memory.
            CorruptError: Sizes or checksums disagree with the data.
            FormatError: It isn't a torch file.
        """
        if step is not None:
            raise NotFoundError(
                "A torch file holds one state and isn't chosen by its step.",
                place=path,
                found=f"step {step}",
                remedy="name the file of that step",
            )
        with opening(budget) as files:
            return replace(open_torch(path, files), on_close=files.close)

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes a zip file that `torch.load(path, weights_only=True, mmap=True)` reads.

        Raises:
            UsageError: The tree holds what `weights_only` refuses; lists every such place.
        """
        write_torch(encoded.tree, stage)


def open_torch(path: Path, files: Files) -> Checkpoint:
    """Reads the pickle and the headers of a torch file, which stays open as long as `files` do.

    Raises:
        NotFoundError: No such file.
        FormatError: As `TorchFile.open`.
    """
    if path.exists() and not path.is_file():
        raise NotFoundError("A torch file is a regular file.", place=path, found="a folder or a device")
    opened = read_object(files.source(path))
    tree = named(opened.tree)
    proof = Proof()
    if isinstance(tree, dict) and isinstance(tree.get(MANIFEST_KEY), str):
        text = tree.pop(MANIFEST_KEY)
        proof = proof_inside(text, tensor_names(tree), path)
    findings = (*opened.findings, *proof.findings)
    return Checkpoint(CONTAINER.name, path, tree, opened.meta, manifest=proof.manifest, findings=findings)


_BECAUSE = {
    "zip": "a zip archive with a data.pkl",
    "legacy": "the magic number of torch's legacy format",
    "tar": "a tar archive of torch's first format",
}


CONTAINER = TorchFile()
