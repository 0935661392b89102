"""What stands beside a model in a folder of Hugging Face's libraries: an optimizer's state, schedulers, and all else.

What has a meaning to an optimizer's run is read: torch files, and Trainer's JSON. Every other file (RNG states,
training arguments, samplers, configurations, tokenizers) is carried byte for byte, as a tensor of bytes. Pickles among
them are read inertly first: one that would run code isn't carried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from statekit.converters.containers.torch_file import CONTAINER as TORCH
from statekit.converters.formats.pickle.reader import read_pickle
from statekit.converters.formats.pytorch.storage import SourceFile
from statekit.converters.formats.pytorch.writer import write_archive
from statekit.errors import FormatError, StatekitError, UsageError
from statekit.files.checkpoint import Finding
from statekit.files.manifest import FILE, inside, read_small
from statekit.files.stage import Stage
from statekit.tensors.tensor import Stored, Tensor, index_shape
from statekit.tensors.tree import Tree, holds_records

FILES = "files"
"""Key of the files that are carried as bytes, by name."""
REST = "statekit.pt"
"""The file for what a conversion brings and these libraries have no file for."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("optimizer.pt", "optimizer.bin"),
    "scheduler": ("scheduler.pt", "scheduler.bin"),
    "scaler": ("scaler.pt",),
    "trainer_state": ("trainer_state.json",),
}
"""Key -> the files that may hold it: Trainer's name, then Accelerate's.

Source: huggingface/transformers, trainer.py; huggingface/accelerate, utils/constants.py.
"""
MAX_CARRIED = 64 * 2**20
"""The largest file that is carried without being understood, in bytes."""
_PICKLES = (".bin", ".pkl", ".pt", ".pth", ".ckpt")
_JSON = ".json"
_MODEL = re.compile(r"(pytorch_model|adapter_model|model).*\.(bin|safetensors)(\.index\.json)?")


@dataclass(frozen=True)
class Beside:
    """What stands beside a model.

    Attributes:
        tree: Parts by key, and carried files under `files`.
        findings: What wasn't carried, and why.
    """

    tree: dict[str, Tree]
    findings: tuple[Finding, ...]


def open_beside(folder: Path, taken: Collection[str], opened: ExitStack) -> Beside:
    """Opens what stands beside a model; reads no tensor.

    Args:
        folder: Where it lies.
        taken: Names of the model's own files.
        opened: Closes the files.

    Raises:
        FormatError: The optimizer's state, or another part, can't be trusted.
    """
    tree: dict[str, Tree] = {}
    read, passed = {FILE, *taken}, set[str]()
    for key, names in PARTS.items():
        name = next((one for one in names if (folder / one).is_file()), None)
        part = None if name is None else _part(folder / name, opened)
        # What `torch.load(weights_only=True)` would refuse is carried as it is.
        if name is not None and (key == "optimizer" or not holds_records(part)):
            tree[key] = part
            read.add(name)
            passed |= {*names} - {name}
    if (folder / REST).is_file():
        rest = _part(folder / REST, opened)
        if not isinstance(rest, Mapping):
            raise FormatError("This isn't what statekit writes.", place=folder / REST, expected="a dict")
        tree = {**rest, **tree}
        read.add(REST)
    carried, findings = _carried(folder, read, passed, opened)
    return Beside({**tree, **({FILES: carried} if carried else {})}, findings)


def write_part(stage: Stage, file: str, key: str, part: Tree) -> None:
    """Writes one part as its file's suffix says; tensors are streamed under `<key>/...`.

    Raises:
        UsageError: The part holds what the file can't.
    """
    with stage.file(file) as output:
        if not file.endswith(_JSON):
            under = f"{key}/" if key else ""
            write_archive(part, output, lambda name, tensor: stage.stream(f"{under}{name}", tensor))
            return
        try:
            text = json.dumps(part, indent=2, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise UsageError("A part can't be written as JSON.", place=key, found=error) from None
        output.write(f"{text}\n".encode("ascii"))


def write_files(stage: Stage, prefix: str, files: Mapping[str, Tensor]) -> None:
    """Writes carried files as they were."""
    for name, tensor in files.items():
        with stage.file(f"{prefix}{name}") as output:
            for block in stage.stream(f"{FILES}/{name}", tensor):
                output.write(block)


def are_files(part: Any) -> bool:
    """Tells whether a part of a tree is files that were carried: bytes by plain names."""
    return isinstance(part, Mapping) and all(
        isinstance(name, str)
        and inside(name)
        and "/" not in name
        and isinstance(one, Tensor)
        and (one.dtype.name, len(one.shape)) == ("uint8", 1)
        for name, one in part.items()
    )


def _part(path: Path, opened: ExitStack) -> Tree:
    if not path.name.endswith(_JSON):
        return opened.enter_context(TORCH.open(path)).tree
    try:
        part = json.loads(read_small(path))  # Trainer writes a loss that is NaN as NaN
    except (ValueError, RecursionError) as error:
        raise FormatError("This isn't valid JSON.", place=path, found=error) from None
    if not isinstance(part, dict):
        raise FormatError("A state isn't a JSON object.", place=path, found=type(part).__name__)
    return part


def _carried(
    folder: Path, read: Collection[str], passed: Collection[str], opened: ExitStack
) -> tuple[dict[str, Tensor], tuple[Finding, ...]]:
    carried: dict[str, Tensor] = {}
    findings = []
    for entry in sorted(folder.iterdir()):
        if entry.name in read:
            continue
        other = entry.name in passed or _MODEL.fullmatch(entry.name)
        why = "another file is taken for what it holds" if other else _uncarried(entry)
        if why:
            findings.append(Finding(f"isn't carried: {why}", str(entry)))
        else:
            source = SourceFile(entry)
            opened.callback(source.close)
            carried[entry.name] = _bytes_of(source)
    return carried, tuple(findings)


def _bytes_of(source: SourceFile) -> Tensor:
    def fetch(index: tuple[slice, ...]) -> Any:
        return source.read(index[0].start, index_shape(index)[0])

    return Stored((source.size,), np.dtype(np.uint8), fetch, source.path.name, str(source.path))


def _uncarried(path: Path) -> str:
    """Says why a file isn't carried; "" if it is."""
    if path.is_symlink() or not path.is_file():
        return "it is a link, a folder or a device"
    if path.stat().st_size > MAX_CARRIED:
        return f"it has more than {MAX_CARRIED} bytes"
    if not path.name.endswith(_PICKLES):
        return ""
    try:
        if TORCH.detect(path) is not None:
            TORCH.open(path).close()
        else:
            read_pickle(path.read_bytes(), str(path))
    except StatekitError as error:
        return error.subject.rstrip(".").lower()
    return ""
