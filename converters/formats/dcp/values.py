"""The values of a distributed checkpoint: tensors joined from boxes that any rank wrote, and other saved objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from statekit.converters.formats.dcp.metadata import Chunk, Contents, Entry, Piece
from statekit.converters.formats.pytorch.reader import read_object
from statekit.converters.formats.pytorch.storage import Part, SourceFile
from statekit.errors import CorruptError, UsageError, fault_list
from statekit.tensors.tensor import Array, Index, Stored, Tensor, index_shape
from statekit.tensors.tree import Tree

MAX_OPEN = 64
"""Files held open at once: a run of a thousand ranks writes thousands."""
_REPEATED = 4096
"""Bytes up to which equal objects are parsed once: hyperparameters stand there again for every parameter."""
_SHOWN = 20


class Files:
    """The files of a checkpoint, opened when they are read, the one that was read least lately closed again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: OrderedDict[str, SourceFile] = OrderedDict()
        self._closed = False

    def source(self, name: str) -> SourceFile:
        """Returns an opened file.

        Raises:
            NotFoundError: It isn't there.
            UsageError: The checkpoint has been closed.
        """
        if self._closed:
            raise UsageError("A tensor is read after its checkpoint was closed.", place=self.folder)
        if name not in self._opened:
            self._opened[name] = SourceFile(self.folder / name)
            if len(self._opened) > MAX_OPEN:
                self._opened.popitem(last=False)[1].close()
        self._opened.move_to_end(name)
        return self._opened[name]

    def close(self) -> None:
        """Closes all of them, for good."""
        self._closed = True
        while self._opened:
            self._opened.popitem()[1].close()


@dataclass(frozen=True)
class _Lasting:
    """A file as a source that outlives its being closed in between."""

    files: Files
    name: str
    size: int

    @property
    def path(self) -> Path:
        return self.files.folder / self.name

    def read(self, start: int, count: int) -> Array:
        return self.files.source(self.name).read(start, count)


def sizes_of(contents: Contents, files: Files) -> dict[str, int]:
    """Returns the size of every file that is mentioned, in bytes.

    Raises:
        NotFoundError: One isn't there.
        CorruptError: A piece lies outside its file; lists every such.
    """
    pieces = dict(contents.objects)
    pieces |= {
        f"{key} at {chunk.box[0]}": chunk.piece
        for key, entry in contents.tensors.items()
        for chunk in entry.chunks
    }
    sizes = {name: files.source(name).size for name in sorted({piece.file for piece in pieces.values()})}
    faults = [
        (f"bytes {p.start} to {p.start + p.size} of {p.file}, which has {sizes[p.file]}", key)
        for key, p in pieces.items()
        if p.start + p.size > sizes[p.file]
    ]
    if faults:
        raise CorruptError(
            f"The files are shorter than the metadata says: {len(faults)} faults.",
            place=files.folder,
            found=fault_list(faults[:_SHOWN]),
            remedy="the checkpoint is damaged or unfinished: fetch it again",
        )
    return sizes


def read_values(contents: Contents, files: Files) -> dict[str, Tree]:
    """Returns the tensor or object of every key; tensors are read when asked for.

    Raises:
        NotFoundError: A file isn't there.
        FormatError: Pieces lie outside their files, or objects can't be trusted.
    """
    sizes = sizes_of(contents, files)
    sources = {name: _Lasting(files, name, size) for name, size in sizes.items()}
    known: dict[bytes, Tree] = {}
    values: dict[str, Tree] = {}
    for key in contents.paths:
        if key in contents.objects:
            values[key] = _object(_part(sources, contents.objects[key]), known)
        else:
            values[key] = _tensor(contents.tensors[key], sources, f"{files.folder}")
    return values


def _part(sources: Mapping[str, _Lasting], piece: Piece) -> Part:
    return Part(sources[piece.file], piece.start, piece.size)


def _object(part: Part, known: dict[bytes, Tree]) -> Tree:
    if part.size > _REPEATED:
        return read_object(part).tree
    raw = part.read(0, part.size).tobytes()
    if raw not in known:
        known[raw] = read_object(part).tree
    return known[raw]


def _tensor(entry: Entry, sources: Mapping[str, _Lasting], place: str) -> Stored:
    boxes = tuple(_Box(chunk, entry, _part(sources, chunk.piece)) for chunk in entry.chunks)
    grain = tuple(max(n, 1) for n in entry.chunks[0].box[1]) if boxes else None
    return Stored(entry.shape, entry.dtype, _Joined(entry, boxes).read, "", place, grain)


@dataclass(frozen=True)
class _Joined:
    """A tensor over its boxes."""

    entry: Entry
    boxes: tuple[_Box, ...]

    def read(self, index: Index) -> Array:
        if len(self.boxes) == 1:
            return self.boxes[0].values().read(index)
        block = np.empty(index_shape(index), self.entry.dtype)
        for box in self.boxes:
            box.fill(block, index)
        return block


@dataclass
class _Box:
    """A box of a tensor, whose header is read with its first values."""

    chunk: Chunk
    entry: Entry
    part: Part
    _values: Tensor | None = field(default=None, repr=False)

    def values(self) -> Tensor:
        """Returns the box as a tensor.

        Raises:
            CorruptError: What was saved isn't the box that the metadata describes.
        """
        if self._values is None:
            saved = read_object(self.part).tree
            shape, dtype = self.chunk.box[1], self.entry.dtype
            if not isinstance(saved, Tensor) or saved.shape != shape or saved.dtype != dtype:
                found = f"{saved.dtype} {saved.shape}" if isinstance(saved, Tensor) else type(saved).__name__
                raise CorruptError(
                    "A part of a tensor isn't what the metadata says.",
                    place=f"byte {self.part.start} of {self.part.path}",
                    expected=f"{dtype} {shape}",
                    found=found,
                )
            self._values = saved
        return self._values

    def fill(self, block: Array, index: Index) -> None:
        """Reads what a block has of the box into it."""
        offsets, sizes = self.chunk.box
        low = [max(s.start, at) for s, at in zip(index, offsets, strict=True)]
        high = [min(s.stop, at + n) for s, at, n in zip(index, offsets, sizes, strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            own = tuple(slice(a - at, b - at) for a, b, at in zip(low, high, offsets, strict=True))
            there = tuple(slice(a - s.start, b - s.start) for a, b, s in zip(low, high, index, strict=True))
            block[there] = self.values().read(own)
