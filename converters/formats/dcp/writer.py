"""Writes distributed checkpoints as one process would: every tensor in one piece, and the metadata that says where.

Equal trees give equal bytes: the metadata names neither the machine nor the moment, which PyTorch's own does.
Source: pytorch/pytorch torch/distributed/checkpoint/filesystem.py, `_write_item`, `FileSystemWriter.finish`;
default_planner.py, `create_default_local_save_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statekit.converters.formats.dcp.metadata import METADATA, StoredPiece, read_metadata
from statekit.converters.formats.dcp.tree import flat_paths
from statekit.converters.formats.dcp.values import read_values
from statekit.converters.formats.pytorch.writer import Opcodes, write_archive
from statekit.files.safetensors import sharded
from statekit.files.sections import CutPoints, Rows, Section
from statekit.files.source import Files
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tensor import Tensor, nbytes
from statekit.tensors.tree import Path, Tree, tensor_names

FILE_BYTES = 16 * 2**30
"""Bytes of a file at most, unless one tensor has more; each thread of PyTorch's writer has a file too."""
_AROUND = 1024
"""Bytes of an archive beside the values in it, about."""
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


@dataclass(frozen=True)
class DcpFolder:
    """A tree as a distributed checkpoint.

    Attributes:
        tree: A dict.
        below: The folder below the target, with its `/`.
        named: What the tensors' names begin with in the checkpoint as a whole, with its `/`.
        nested: Whether the metadata says how the flat keys make a tree; without, each key of the dict is one.
    """

    tree: Mapping[Any, Tree]
    below: str = ""
    named: str = ""
    nested: bool = True

    def image(self, cut: CutPoints) -> list[Section]:
        """Returns the files of pieces; each gives `join` where its pieces begin, and their sizes.

        Raises:
            UsageError: Two paths give one flat key, or something can't be saved; lists every such place.
        """
        return [self._section(file, entries) for file, entries in self._files(cut)]

    def join(self, stage: Stage, cut: CutPoints, records: Mapping[str, Any]) -> None:
        """Writes the metadata.

        Args:
            stage: Where.
            cut: As in `image`.
            records: What the sections gave, by their names.
        """
        saved = [
            entry
            for file, entries in self._files(cut)
            for entry in _saved(file, entries, records[f"{self.below}{file}"])
        ]
        with stage.file(f"{self.below}{METADATA}") as output:
            output.write(_Metadata().whole(saved, self.nested))

    def _files(self, cut: CutPoints) -> Iterator[tuple[str, _Entries]]:
        tree = self.tree
        entries = flat_paths(tree) if self.nested else {key: ((key,), value) for key, value in tree.items()}
        parts = sharded(entries, cut.limit(FILE_BYTES), lambda entry: _stored_bytes(entry[1]))
        for number, part in enumerate(parts):
            yield f"__0_{number}.distcp", part

    def _name(self, path: Path) -> str:
        return f"{self.named}{'/'.join(map(str, path))}"

    def _section(self, file: str, entries: _Entries) -> Section:
        def write(stage: Stage) -> list[list[int]]:
            record, start = [], 0
            with stage.file(f"{self.below}{file}") as output:
                for path, value in entries.values():
                    write_archive(value, output, _streamed(stage, self._name(path)))
                    record.append([start, output.tell() - start])
                    start = output.tell()
            return record

        def read(path: Place, files: Files, record: Any) -> dict[str, Tensor]:
            folder = path / self.below if self.below else path
            metadata = _Metadata().whole(_saved(file, entries, record), nested=True)
            contents = read_metadata(metadata, f"{folder / file}", files.account)
            values, _ = read_values(contents, folder, files)
            return self._tensors({key: (entries[key][0], value) for key, value in values.items()})

        return Section(
            f"{self.below}{file}", self._tensors(entries), write, read, record=Rows, rows=len(entries)
        )

    def _tensors(self, entries: _Entries) -> dict[str, Tensor]:
        return {
            _at(self._name(path), leaf): tensor
            for path, value in entries.values()
            for leaf, tensor in _tensors_in(value).items()
        }


_Entries = Mapping[str, tuple[Path, Tree]]
"""By flat key, the path in the tree and the value."""


def _streamed(stage: Stage, name: str) -> Callable[[str, Tensor], Iterator[memoryview]]:
    """Returns what gives the bytes of the tensors in a value, by their names there."""
    return lambda leaf, tensor: stage.stream(_at(name, leaf), tensor)


def _at(name: str, leaf: str) -> str:
    """Returns the name of a tensor in a value that may be a tensor itself: in the whole tree."""
    return f"{name}/{leaf}" if leaf else name


def _tensors_in(value: Tree) -> dict[str, Tensor]:
    return {"": value} if isinstance(value, Tensor) else tensor_names(value)


def _stored_bytes(value: Tree) -> int:
    """Returns about how many bytes a value takes in a file, which no value has to be read for."""
    return _AROUND + sum(map(nbytes, _tensors_in(value).values()))


def _saved(file: str, entries: _Entries, record: Sequence[Sequence[int]]) -> Iterator[Saved]:
    for (key, (path, value)), (start, size) in zip(entries.items(), record, strict=True):
        yield Saved(key, path, value, StoredPiece(file, start, size))


class _Metadata:
    """The pickle that PyTorch's reader makes its `Metadata` of."""

    def __init__(self) -> None:
        self._ops = Opcodes()

    def whole(self, saved: Iterable[Saved], nested: bool) -> bytes:
        """Returns the pickle."""
        ops, saved = self._ops, [*saved]
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
