"""The values of a distributed checkpoint: tensors joined from boxes that any rank wrote, and other saved objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from statekit.converters.formats.dcp.metadata import Chunk, Entry, StoredContents, StoredPiece
from statekit.converters.formats.pytorch.reader import Opened, read_object
from statekit.errors import CorruptError, Faults
from statekit.files.checkpoint import Finding
from statekit.files.checksums import ZIP
from statekit.files.source import Counts, File, Files, Part, bring, byte_of, bytes_at
from statekit.files.tree import Place
from statekit.tensors.boxes import overlap
from statekit.tensors.tensor import Array, Index, Stored, Tensor, in_memory, index_shape
from statekit.tensors.tree import Tree

_REPEATED = 4096
"""Bytes up to which equal objects are parsed once: hyperparameters stand there again for every parameter."""
_SCALARS = 256
"""Different scalars that are kept: the counts of a run are few."""


def read_sources(contents: StoredContents, folder: Place, files: Files) -> dict[str, File]:
    """Returns every file that is mentioned, by name.

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
    sources = {
        name: files.source(folder / name) for name in sorted({piece.file for piece in pieces.values()})
    }
    faults = Faults(
        (f"bytes {p.start} to {p.start + p.size} of {p.file}, which has {sources[p.file].size}", key)
        for key, p in pieces.items()
        if p.start + p.size > sources[p.file].size
    )
    faults.check(
        CorruptError,
        "The files are shorter than the metadata says",
        place=folder,
        remedy="the checkpoint is damaged or unfinished: fetch it again",
    )
    return sources


def read_values(
    contents: StoredContents, folder: Place, files: Files
) -> tuple[dict[str, Tree], tuple[Finding, ...]]:
    """Returns the tensor or object of every key, and what was odd; tensors are read when asked for.

    Raises:
        NotFoundError: A file isn't there.
        FormatError: Pieces lie outside their files, or objects can't be trusted.
    """
    sources = read_sources(contents, folder, files)
    for name, runs in _small_runs(contents.objects.values()).items():
        bring(sources[name], runs)
    pieces = (chunk.piece for entry in contents.tensors.values() for chunk in entry.chunks)
    small = _Small({name: Counts(sources[name], runs) for name, runs in _small_runs(pieces).items()})
    files_read: dict[bytes, Opened] = {}
    objects = {key: _object(_part(sources, piece), files_read) for key, piece in contents.objects.items()}
    # Tensors' pieces aren't looked into yet; who saved them computes checksums for all pieces or for none.
    checksum = ZIP if all(file.is_checked for file in objects.values()) else ""
    values: dict[str, Tree] = {}
    for key in contents.paths:
        if key in objects:
            values[key] = objects[key].tree
        else:
            values[key] = _tensor(contents.tensors[key], sources, f"{folder}", checksum, small)
    return values, tuple(dict.fromkeys(finding for file in objects.values() for finding in file.findings))


def _small_runs(pieces: Iterable[StoredPiece]) -> dict[str, list[tuple[int, int]]]:
    """Returns the places of small pieces by file. Each hyperparameter and each count is an archive of its own."""
    runs: dict[str, list[tuple[int, int]]] = {}
    for piece in pieces:
        if piece.size <= _REPEATED:
            runs.setdefault(piece.file, []).append((piece.start, piece.size))
    return runs


def _part(sources: Mapping[str, File], piece: StoredPiece) -> Part:
    return Part(sources[piece.file], piece.start, piece.size)


def _object(part: Part, files_read: dict[bytes, Opened]) -> Opened:
    if part.size > _REPEATED:
        return read_object(part)
    raw = bytes_at(part, 0, part.size)
    if raw not in files_read:
        files_read[raw] = read_object(part)
    return files_read[raw]


def _tensor(entry: Entry, sources: Mapping[str, File], place: str, checksum: str, small: _Small) -> Stored:
    boxes = tuple(_Box(chunk, entry, _part(sources, chunk.piece), small) for chunk in entry.chunks)
    # What lies in one piece streams as it lies in its file.
    grain = tuple(max(n, 1) for n in entry.chunks[0].box[1]) if len(boxes) > 1 else None
    files = {box.part.place for box in boxes}
    place = files.pop() if len(files) == 1 else place
    return Stored(entry.shape, entry.dtype, _Joined(entry, boxes).read, "", place, grain, checksum=checksum)


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
class _Small:
    """Pieces of tensors that are small.

    Attributes:
        counts: Those of each file, by its name.
        scalars: The scalars of the checkpoint that were read, by the bytes of their archives.
    """

    counts: Mapping[str, Counts]
    scalars: dict[bytes, Tensor] = field(default_factory=dict)


@dataclass
class _Box:
    """A box of a tensor, whose header is read with its first values."""

    chunk: Chunk
    entry: Entry
    part: Part
    small: _Small = field(repr=False)
    _values: Tensor | None = field(default=None, repr=False)

    def values(self) -> Tensor:
        """Returns the box as a tensor."""
        if self._values is None:
            saved = self._saved()
            shape, dtype = self.chunk.box[1], self.entry.dtype
            if not isinstance(saved, Tensor) or saved.shape != shape or saved.dtype != dtype:
                saved_type = (
                    f"{saved.dtype} {saved.shape}" if isinstance(saved, Tensor) else type(saved).__name__
                )
                raise CorruptError(
                    "A part of a tensor isn't what the metadata says.",
                    place=byte_of(self.part, 0),
                    expected=f"{dtype} {shape}",
                    found=saved_type,
                )
            self._values = saved
        return self._values

    def _saved(self) -> Tree:
        """Returns what was saved. Every parameter's count is the same archive, which is parsed once."""
        if self.part.size <= _REPEATED:
            self.small.counts[self.chunk.piece.file].bring()
        if self.entry.shape or self.part.size > _REPEATED:
            return read_object(self.part).tree
        raw = bytes_at(self.part, 0, self.part.size)
        scalars = self.small.scalars
        if raw in scalars:
            return scalars[raw]
        saved = read_object(self.part).tree
        if isinstance(saved, Tensor) and not saved.shape:
            saved = in_memory(saved.read())
            if len(scalars) < _SCALARS:
                scalars[raw] = saved
        return saved

    def fill(self, block: Array, index: Index) -> None:
        """Reads what a block has of the box into it."""
        if (both := overlap(index, self.chunk.box)) is not None:
            block[both[1]] = self.values().read(both[0])
