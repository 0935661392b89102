"""Writes distributed checkpoints as one process would: every tensor in one piece, and the metadata that says where.

Equal trees give equal bytes: the metadata names neither the machine nor the moment, which PyTorch's own does.
Source: pytorch/pytorch torch/distributed/checkpoint/filesystem.py, `_write_item`, `FileSystemWriter.finish`;
default_planner.py, `create_default_local_save_plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO

from statekit.converters.formats.dcp.metadata import METADATA, StoredPiece
from statekit.converters.formats.dcp.tree import flat_paths
from statekit.converters.formats.pytorch.writer import Opcodes, write_archive
from statekit.files.stage import Stage
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Path, Tree

FILE_BYTES = 16 * 2**30
"""The size from which on the next piece begins another file, as each thread of PyTorch's writer has one."""
VERSION = "1.0.0"
_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"


@dataclass(frozen=True)
class Saved:
    """An entry that was written: its flat key, its path in the tree, its value, and where it lies."""

    key: str
    path: Path
    value: Tree
    piece: StoredPiece


def write_dcp(tree: Tree, stage: Stage, below: str = "", named: str = "", nested: bool = True) -> None:
    """Writes a tree as a distributed checkpoint below a stage.

    Args:
        tree: A dict.
        stage: Where.
        below: The folder below it, with its `/`.
        named: What the tensors' names begin with in the checkpoint as a whole, with its `/`.
        nested: Whether the metadata says how the flat keys make a tree; without, each key of the dict is one.

    Raises:
        UsageError: Two paths give one flat key, or something can't be saved; lists every such place.
    """
    entries = flat_paths(tree) if nested else {key: ((key,), value) for key, value in tree.items()}
    saved = list(_written(entries, stage, below, named))
    with stage.file(f"{below}{METADATA}") as file:
        file.write(_Metadata().whole(saved, nested))


def _written(
    entries: Mapping[str, tuple[Path, Tree]], stage: Stage, below: str, named: str
) -> Iterator[Saved]:
    number, file, start = 0, None, 0
    with ExitStack() as opened:
        for key, (path, value) in entries.items():
            if file is None or start >= FILE_BYTES:
                opened.close()
                name, start = f"__0_{number}.distcp", 0
                file, number = opened.enter_context(stage.file(f"{below}{name}")), number + 1
            _save(file, value, stage, f"{named}{'/'.join(map(str, path))}")
            yield Saved(key, path, value, StoredPiece(name, start, file.tell() - start))
            start = file.tell()


def _save(file: BinaryIO, value: Tree, stage: Stage, name: str) -> None:
    """Writes one entry; tensors of a value that isn't one have the names that they have in the whole tree."""
    write_archive(value, file, lambda leaf, tensor: stage.stream(f"{name}/{leaf}" if leaf else name, tensor))


class _Metadata:
    """The pickle that PyTorch's reader makes its `Metadata` of."""

    def __init__(self) -> None:
        self._ops = Opcodes()

    def whole(self, saved: list[Saved], nested: bool) -> bytes:
        """Returns the pickle."""
        ops = self._ops
        self._begin(_METADATA, "Metadata")
        ops.text("state_dict_metadata")
        ops.out += b"}("
        for entry in saved:
            ops.text(entry.key)
            self._described(entry.value)
        ops.out += b"u"
        ops.text("planner_data")
        if nested:
            ops.out += b"}("
            for entry in saved:
                ops.text(entry.key)
                self._path(entry.path)
            ops.out += b"u"
        else:
            ops.out += b"N"
        ops.text("storage_data")
        ops.out += b"}("
        for entry in saved:
            self._index(entry)
            self._info(entry.piece)
        ops.out += b"u"
        ops.text("storage_meta")
        ops.out += b"N"
        ops.text("version")
        ops.text(VERSION)
        ops.out += b"ub."
        return bytes(ops.out)

    def _begin(self, module: str, name: str) -> None:
        """Begins an object whose state is a dict; `ub` ends it."""
        self._ops.name(module, name)
        self._ops.out += b")\x81}("

    def _size(self, numbers: tuple[int, ...]) -> None:
        self._ops.name("torch", "Size")
        self._ops.integers(numbers)
        self._ops.out += b"\x85R"

    def _described(self, value: Tree) -> None:
        ops = self._ops
        if not isinstance(value, Tensor):
            ops.name(_METADATA, "BytesStorageMetadata")
            ops.out += b")\x81"
            return
        self._begin(_METADATA, "TensorStorageMetadata")
        ops.text("properties")
        self._properties(value)
        ops.text("size")
        self._size(value.shape)
        ops.text("chunks")
        ops.out += b"]"
        self._begin(_METADATA, "ChunkStorageMetadata")
        ops.text("offsets")
        self._size((0,) * len(value.shape))
        ops.text("sizes")
        self._size(value.shape)
        ops.out += b"uba"
        ops.out += b"ub"

    def _properties(self, tensor: Tensor) -> None:
        """Emits dtype, layout, requires_grad, memory format and pinning."""
        ops = self._ops
        ops.name(_METADATA, "TensorProperties")
        ops.out += b")\x81("
        ops.name("torch", tensor.dtype.name)
        ops.name("torch.serialization", "_get_layout")
        ops.text("torch.strided")
        ops.out += b"\x85R\x89"
        ops.name(_METADATA, "_MEM_FORMAT_ENCODING")
        ops.out += b"K\x00\x85R\x89tb"

    def _path(self, path: Path) -> None:
        self._ops.out += b"("
        for part in path:
            if isinstance(part, int):
                self._ops.integer(part)
            else:
                self._ops.text(part)
        self._ops.out += b"t"

    def _index(self, entry: Saved) -> None:
        ops = self._ops
        self._begin(_METADATA, "MetadataIndex")
        ops.text("fqn")
        ops.text(entry.key)
        if isinstance(entry.value, Tensor):
            ops.text("index")
            ops.out += b"K\x00"
            ops.text("offset")
            self._size((0,) * len(entry.value.shape))
        else:
            ops.text("index")
            ops.out += b"N"
            ops.text("offset")
            ops.out += b"N"
        ops.out += b"ub"

    def _info(self, piece: StoredPiece) -> None:
        ops = self._ops
        self._begin(_STORAGE, "_StorageInfo")
        ops.text("relative_path")
        ops.text(piece.file)
        ops.text("offset")
        ops.integer(piece.start)
        ops.text("length")
        ops.integer(piece.size)
        ops.out += b"ub"
