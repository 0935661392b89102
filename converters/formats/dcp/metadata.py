"""The file `.metadata` of a distributed checkpoint: what is in it, in which pieces, and where each lies.

PyTorch reads it with pickle.load, which runs what it says; here it is data, checked before anything is believed. The
boxes that a tensor is cut into must cover it exactly: none reaches beyond it, none overlaps another, nothing is left.
Source: pytorch/pytorch torch/distributed/checkpoint/metadata.py; filesystem.py, `_StorageInfo`; planner_helpers.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NotRequired, TypedDict

from statekit.budget import Account
from statekit.converters.formats.pickle.names import shown
from statekit.converters.formats.pickle.reader import read_pickle
from statekit.converters.formats.pytorch.reader import torch_calls, torch_dtype
from statekit.converters.formats.storage import MAX_RANK
from statekit.errors import CorruptError, Faults, FormatError, RefusedError
from statekit.tensors.boxes import Box, tiling_fault
from statekit.tensors.tensor import DType, Shape
from statekit.tensors.tree import Path, Record
from statekit.tensors.typed import Name, Natural, typed

METADATA = ".metadata"
"""The file that tells what lies where."""
_HOME = "torch.distributed."
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"


@dataclass(frozen=True)
class StoredPiece:
    """A run of bytes in one of the checkpoint's files: what torch.save wrote of one entry or one part of it."""

    file: str
    start: int
    size: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its values lie."""

    box: Box
    piece: StoredPiece


@dataclass(frozen=True)
class Entry:
    """A tensor: boxes that cover it exactly."""

    shape: Shape
    dtype: DType
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StoredContents:
    """What `.metadata` says.

    Attributes:
        tensors: By flat key.
        objects: Everything else by flat key: where it lies.
        paths: For each flat key its keys in the tree, in the tree's order.
        version: Version of the format; None before PyTorch wrote one.
        notes: What had no place.
    """

    tensors: Mapping[str, Entry]
    objects: Mapping[str, StoredPiece]
    paths: Mapping[str, Path]
    version: str | None
    notes: tuple[str, ...]


class StorageInfo(TypedDict):
    """Where a piece lies. Source: filesystem.py, `_StorageInfo`."""

    relative_path: Name
    offset: Natural
    length: Natural
    transform_descriptors: NotRequired[Sequence[Any] | None]


@dataclass
class _Reading:
    """The faults met so far, and where each piece lies by its key and its offsets."""

    place: str
    account: Account
    pieces: dict[tuple[str, Shape | None], StoredPiece] = field(default_factory=dict)
    claimed: set[tuple[str, Shape | None]] = field(default_factory=set)
    faults: Faults = field(default_factory=Faults)

    def piece(self, key: str, offsets: Shape | None) -> StoredPiece | None:
        piece = self.pieces.get((key, offsets))
        self.claimed.add((key, offsets))
        if piece is None:
            self.faults.add(f"its values at {offsets} are nowhere" if offsets else "lies nowhere", key)
        return piece


def read_metadata(data: bytes, place: str, account: Account | None = None) -> StoredContents:
    """Reads and checks the pickle; lists every fault.

    Raises:
        RefusedError: It calls for code, names files elsewhere, or asks for absurd memory.
        CorruptError: Pieces are missing, overlap, or leave holes.
        FormatError: It isn't what PyTorch writes.
    """
    pickled = read_pickle(data, place, calls=torch_calls, account=account)
    whole = _whole(pickled.value, place)
    listed, stored = whole.get("state_dict_metadata"), whole.get("storage_data")
    if not isinstance(listed, dict) or not isinstance(stored, dict):
        raise FormatError("The metadata lists no entries or no places.", place=place)
    reading = _Reading(place, account or Account())
    _pieces(reading, stored)
    tensors, objects = dict[str, Entry](), dict[str, StoredPiece]()
    for key, entry in listed.items():
        if not isinstance(key, str):
            raise FormatError("The name of an entry is not text.", place=place, found=shown(key))
        if _is(entry, "BytesStorageMetadata"):
            piece = reading.piece(key, None)
            objects |= {key: piece} if piece else {}
        else:
            tensor = _tensor(reading, key, _fields(entry, "TensorStorageMetadata", place))
            tensors |= {key: tensor} if tensor else {}
    reading.faults += [
        (f"values at {offsets} belong to no entry" if offsets else "is stored, and no entry", key)
        for key, offsets in reading.pieces.keys() - reading.claimed
    ]
    paths = _paths(listed, whole.get("planner_data"), reading)
    reading.faults.check(CorruptError, "The metadata contradicts itself", place=place)
    version = whole.get("version")
    return StoredContents(
        tensors, objects, paths, version if isinstance(version, str) else None, pickled.notes
    )


def _whole(record: Any, place: str) -> Mapping[str, Any]:
    """Returns the fields of the metadata, PyTorch's or those of Megatron-Core before 0.16."""
    if not isinstance(record, Record) or record.name != _MEGATRON or not isinstance(record.state, dict):
        return _fields(record, "Metadata", place)
    megatron_data = record.state.get("mcore_data")
    if isinstance(megatron_data, dict):
        flattened = [key for key, is_flattened in megatron_data.items() if is_flattened]
    else:
        flattened = []
    if flattened:
        raise RefusedError(
            "Tensors were flattened before they were cut, as Megatron-Core did before 0.16.",
            place=place,
            found=f"{len(flattened)} tensors, such as {shown(flattened[0])}",
            remedy="save it with --dist-ckpt-optim-fully-reshardable, or with Megatron-Core 0.16",
        )
    fields: Mapping[str, Any] = record.state
    return fields


def _is(record: Any, name: str) -> bool:
    return (
        isinstance(record, Record)
        and record.name.startswith(_HOME)
        and record.name.rpartition(".")[2] == name
    )


def _fields(record: Any, name: str, place: str) -> Mapping[str, Any]:
    if not _is(record, name) or not isinstance(record.state, dict):
        class_name = record.name if isinstance(record, Record) else record
        raise FormatError(
            "The metadata isn't what PyTorch writes.", place=place, expected=name, found=shown(class_name)
        )
    fields: Mapping[str, Any] = record.state
    return fields


def _shape(value: Any, place: str) -> Shape:
    if (
        not isinstance(value, tuple)
        or len(value) > MAX_RANK
        or not all(type(n) is int and 0 <= n < 2**62 for n in value)
    ):
        raise FormatError(
            "Sizes or offsets in the metadata are not possible.",
            place=place,
            expected=f"non-negative integers for at most {MAX_RANK} axes",
            found=shown(value),
        )
    return value


def _pieces(reading: _Reading, stored: Mapping[Any, Any]) -> None:
    for index, info in stored.items():
        key, offsets = _index(index, reading.place)
        subject = "The metadata isn't what PyTorch writes"
        fields = typed(_fields(info, "_StorageInfo", reading.place), StorageInfo, reading.place, subject)
        file, start, size = fields["relative_path"], fields["offset"], fields["length"]
        if not _plain_name(file):
            raise RefusedError(
                "The metadata names a file outside the checkpoint.",
                place=reading.place,
                expected="the plain name of a file beside it",
                found=shown(file),
            )
        if fields.get("transform_descriptors"):
            raise RefusedError(
                "The values of this checkpoint went through an extension, such as compression.",
                place=reading.place,
                found=", ".join(map(shown, fields["transform_descriptors"] or ())),
                remedy="load it with the PyTorch that wrote it and save it without extensions",
            )
        piece = StoredPiece(file, start, size)
        if reading.pieces.setdefault((key, offsets), piece) != piece:
            reading.faults.add(f"lies in two places at {offsets}", key)
    _apart(reading)


def _plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and not any(c in name for c in "/\\\0:")


def _apart(reading: _Reading) -> None:
    """Notes pieces that share bytes: each is written by itself, so one of them lies."""
    ordered = sorted(
        ((p.file, p.start, p.size, key) for (key, _), p in reading.pieces.items()),
        key=lambda piece: piece[:3],
    )
    for (file, start, size, key), (other, begin, _, following) in pairwise(ordered):
        if file == other and start + size > begin:
            reading.faults.add(f"overlaps {following} in {shown(file)} at byte {begin}", key)


def _index(index: Any, place: str) -> tuple[str, Shape | None]:
    # As a key of a dict, an object's state has become a tuple of pairs.
    pairs = index.state if _is(index, "MetadataIndex") else None
    if not isinstance(pairs, tuple):
        raise FormatError("The metadata isn't what PyTorch writes.", place=place, expected="MetadataIndex")
    fields = dict(pair for pair in pairs if isinstance(pair, tuple) and len(pair) == 2)
    key, offsets = fields.get("fqn"), fields.get("offset")
    if not isinstance(key, str):
        raise FormatError("The name of an entry is not text.", place=place, found=shown(key))
    return key, None if offsets is None else _shape(offsets, place)


def _tensor(reading: _Reading, key: str, fields: Mapping[str, Any]) -> Entry | None:
    shape, dtype = _shape(fields.get("size"), reading.place), _dtype(fields.get("properties"), reading)
    chunks = dict[Box, Chunk]()  # what every rank holds alike may be listed once for each
    for offsets, sizes in _boxes(fields.get("chunks"), reading.place):
        if not math.prod(sizes) and (key, offsets) not in reading.pieces:
            continue  # a rank that got nothing
        piece = reading.piece(key, offsets)
        if piece is None:
            return None
        if math.prod(sizes) * dtype.itemsize > piece.size:
            reading.faults.add(f"needs more bytes at {offsets} than the {piece.size} it has", key)
            return None
        chunks[offsets, sizes] = Chunk((offsets, sizes), piece)
    fault = tiling_fault(shape, list(chunks), f"{key} in {reading.place}", reading.account)
    if fault:
        reading.faults.add(fault, key)
        return None
    return Entry(shape, dtype, tuple(chunks.values()))


def _boxes(chunks: Any, place: str) -> Iterator[Box]:
    for chunk in chunks if isinstance(chunks, list | tuple) else ():
        fields = _fields(chunk, "ChunkStorageMetadata", place)
        yield _shape(fields.get("offsets"), place), _shape(fields.get("sizes"), place)


def _dtype(properties: Any, reading: _Reading) -> DType:
    # Source: metadata.py, `TensorProperties.__getstate__`: a tuple that begins with dtype and layout.
    state = properties.state if _is(properties, "TensorProperties") else None
    first = state[0] if isinstance(state, tuple) and state else None
    dtype = torch_dtype(first)
    if dtype is None:
        raise FormatError(
            "The metadata has a tensor of a type that statekit doesn't carry.",
            place=reading.place,
            found=shown(first.name if isinstance(first, Record) else state),
        )
    return dtype


def _paths(listed: Mapping[str, Any], planned: Any, reading: _Reading) -> dict[str, Path]:
    """Returns the path of every key: what the planner noted, or the key itself where there was no planner."""
    noted = planned if isinstance(planned, dict) else {}
    if noted:
        reading.faults += [("has no place in the tree", key) for key in listed if key not in noted]
    paths: dict[str, Path] = {}
    for key in [*(key for key in noted if key in listed), *(key for key in listed if key not in noted)]:
        path = noted.get(key, (key,))
        if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
            raise FormatError(
                "The place of an entry in its tree is not possible.",
                place=reading.place,
                expected="names and indices",
                found=f"{shown(path)} for {shown(key)}",
            )
        paths[key] = path
    return paths
