"""PyTorch's file format before 1.6: pickles one after the other, then the storages.

Magic number, protocol 1001, facts about the machine, the object, the list of storage keys; then for each key the
number of elements (8 bytes) and the values, always little-endian.
Source: torch/serialization.py, `_legacy_save` and `_legacy_load`; torch/csrc/serialization.cpp.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from statekit.converters.formats.pickle.machine import TruncatedPickle
from statekit.converters.formats.pickle.names import shown
from statekit.converters.formats.pickle.reader import Unpickled, read_pickle
from statekit.converters.formats.pytorch.names import storage_id, torch_calls
from statekit.converters.formats.pytorch.storage import Source, Storage, short
from statekit.errors import CorruptError, FormatError, RefusedError
from statekit.tensors.tensor import Array

MAGIC = 0x1950A86A20F9469CFC6C
MAGIC_BYTES = MAGIC.to_bytes(10, "little")
PROTOCOL = 1001
WINDOWS = (2**20, 2**24, 2**28)
"""How much of a file is tried, in bytes, to find the end of its pickles."""
SWAPPED = sys.byteorder == "big"


@dataclass(frozen=True)
class LegacyFile:
    """What a legacy file holds.

    Attributes:
        tree: The saved object, its tensors over storages.
        notes: What had no place in the tree.
        storages: Number of storages.
        rest: Bytes behind the last storage.
    """

    tree: Any
    notes: tuple[str, ...]
    storages: int
    rest: int


class _Storages:
    """The storages that a pickle mentions; where each lies is known only after the pickles have been read."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.roots: dict[str, Storage] = {}
        self.starts: dict[str, int] = {}

    def resolve(self, saved: Any) -> Any:
        """Returns the storage of a persistent id, or a part of one."""
        if isinstance(saved, tuple) and len(saved) == 4 and saved[0] in ("module", b"module"):
            return saved[1]  # the class of a module, saved with its source text
        place = f"{self.source.path}"
        dtype, key, count, rest = storage_id(saved, place)
        root = Storage(
            f"storage {key}", place, dtype, count * dtype.itemsize, partial(self.fetch, key), SWAPPED
        )
        if self.roots.setdefault(key, root) != root:
            raise FormatError("A storage is described in two ways.", place=f"storage {shown(key)} in {place}")
        view = rest[0] if rest else None
        return self.roots[key] if view is None else self._part(root, key, view)

    def _part(self, root: Storage, key: str, view: Any) -> Storage:
        if (
            not isinstance(view, tuple)
            or len(view) != 3
            or not all(type(n) is int and n >= 0 for n in view[1:])
        ):
            raise FormatError(
                "A part of a storage isn't described as such.", place=f"storage {key} in {root.place}"
            )
        name, first, count = f"storage {shown(view[0])}", view[1], view[2]
        start, nbytes = first * root.dtype.itemsize, count * root.dtype.itemsize
        if start + nbytes > root.nbytes:
            raise CorruptError("A part of a storage reaches beyond it.", place=f"{name} in {root.place}")
        return Storage(name, root.place, root.dtype, nbytes, partial(self.fetch, key, shift=start), SWAPPED)

    def fetch(self, key: str, start: int, count: int, shift: int = 0) -> Array:
        """Reads bytes of a storage."""
        return self.source.read(self.starts[key] + shift + start, count)


def read_legacy(source: Source) -> LegacyFile:
    """Reads the pickles of a legacy file and finds its storages.

    Raises:
        FormatError: The bytes don't follow the format.
        CorruptError: The file is cut off, or sizes disagree.
    """
    for size in [*(size for size in WINDOWS if size < source.size), min(source.size, WINDOWS[-1])]:
        storages = _Storages(source)
        try:
            saved, keys = _pickles(source.read(0, size).tobytes(), storages)
            break
        except TruncatedPickle:
            if size == source.size:
                raise
    else:
        raise RefusedError(
            "The pickles of a legacy torch file are too large.",
            place=source.path,
            expected=f"at most {WINDOWS[-1]} bytes before the storages",
        )
    end = _locate(storages, keys.value, keys.end)
    return LegacyFile(saved.value, saved.notes, len(storages.starts), source.size - end)


def _pickles(data: bytes, storages: _Storages) -> tuple[Unpickled, Unpickled]:
    """Reads the five pickles; returns the saved object and the list of storage keys."""
    place = f"{storages.source.path}"
    magic = read_pickle(data, place)
    version = read_pickle(data, place, start=magic.end)
    if magic.value != MAGIC or version.value != PROTOCOL:
        raise FormatError(
            "A file isn't a legacy torch file.",
            place=place,
            expected=f"magic number {MAGIC:#x}, protocol {PROTOCOL}",
            found=f"{shown(magic.value)}, {shown(version.value)}",
        )
    machine = read_pickle(data, place, start=version.end)
    saved = read_pickle(data, place, start=machine.end, calls=torch_calls, persistent=storages.resolve)
    return saved, read_pickle(data, place, start=saved.end)


def _locate(storages: _Storages, keys: Any, at: int) -> int:
    """Walks over the storages in the file's order, comparing their declared sizes; returns where they end."""
    source = storages.source
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages.roots):
        raise FormatError(
            "The list of storages doesn't fit the tensors.",
            place=source.path,
            expected=f"{len(storages.roots)} storages",
            found=f"{len(keys)} keys" if isinstance(keys, list) else shown(keys),
        )
    for key in map(str, keys):
        root = storages.roots[key]
        count = int.from_bytes(source.read(at, 8).tobytes(), "little", signed=True)
        if count * root.dtype.itemsize != root.nbytes:
            raise CorruptError(
                "The size of a storage isn't the declared one.",
                place=f"{root.name} in {root.place}",
                expected=f"{root.nbytes // root.dtype.itemsize} elements",
                found=f"{count}",
            )
        storages.starts[key] = at + 8
        at += 8 + root.nbytes
        if at > source.size:
            raise short(source, at - root.nbytes, root.nbytes)
    return at
