"""Writes a tree as an HDF5 file, as `reader` reads it and as Keras lays it out: contiguous, without filters.

The library lays out the file in memory, without the values, and never meets a disk: one that is full as it closes a
file crashes it. Values and layout are written here, each to its place.

Source: keras-team/keras, keras/src/saving/saving_lib.py, `H5IOStore.__setitem__`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from statekit.errors import Faults, FormatError
from statekit.files.checkpoint import ATTRIBUTES
from statekit.files.stage import Stage
from statekit.tensors.tensor import DTYPES, Tensor
from statekit.tensors.tree import Tree, walk

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

MANIFEST = "statekit"
"""Attribute of the file that holds the manifest."""
_KINDS = "biuf"
_PAGE = 4096
_ZEROS = bytes(_PAGE)


def write_hdf5(tree: Tree, output: BinaryIO, stage: Stage, apart: int = 1) -> dict[str, Any]:
    """Writes a tree, and the manifest of what was streamed, which `Stage.complete` has to complete.

    Args:
        tree: Dicts, tensors at the leaves, plain attributes under `@`.
        output: An empty file.
        stage: What digests the tensors.
        apart: As `Stage.manifest` has it.

    Returns:
        The manifest.

    Raises:
        FormatError: The format can't hold something in it; lists every such place.
    """
    import h5py

    faults = Faults(_faults(tree))
    faults.check(FormatError, "An HDF5 file can't hold these")
    layout = _Layout()
    with h5py.File(layout, "w") as file:
        for name, tensor, start in _datasets(file["/"], tree, ()):
            output.seek(start)
            for block in stage.stream(name, tensor):
                output.write(block)
        manifest = stage.manifest(apart)
        file.attrs[MANIFEST] = manifest_bytes(manifest).decode("ascii")
    layout.copy(output)
    return manifest


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """Returns a manifest as it stands in a file."""
    return json.dumps(manifest, sort_keys=True).encode("ascii")


class _Layout(io.RawIOBase):
    """A file in memory: what the library writes around the values. What it doesn't write is zeros."""

    def __init__(self) -> None:
        self._pages = dict[int, bytearray]()
        self._runs = set[tuple[int, int]]()
        self._at = self._size = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        self._size = self._at if size is None else size
        return self._size

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        for start, page, cut in _cuts(self._at, len(view)):
            view[start : start + cut.stop - cut.start] = self._pages.get(page, _ZEROS)[cut]
        self._at += len(view)
        return len(view)

    def write(self, data: ReadableBuffer) -> int:
        view = memoryview(data).cast("B")
        for start, page, cut in _cuts(self._at, len(view)):
            self._pages.setdefault(page, bytearray(_PAGE))[cut] = view[start : start + cut.stop - cut.start]
        self._runs.add((self._at, len(view)))
        self._at += len(view)
        self._size = max(self._size, self._at)
        return len(view)

    def copy(self, output: BinaryIO) -> None:
        """Writes what was written here to its places in a file, and makes that as long."""
        for begin, count in sorted(self._runs):
            for start, page, cut in _cuts(begin, count):
                output.seek(begin + start)
                output.write(self._pages[page][cut])
        output.truncate(self._size)


def _cuts(at: int, count: int) -> Iterator[tuple[int, int, slice]]:
    """Yields how a run of bytes lies in pages: how many of it are before, which page, and where in it."""
    start = 0
    while start < count:
        page, begin = divmod(at + start, _PAGE)
        size = min(_PAGE - begin, count - start)
        yield start, page, slice(begin, begin + size)
        start += size


def _datasets(
    group: Any, tree: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[str, Tensor, int]]:
    """Makes groups and data sets; yields each tensor's name, and where in the file its values are to be."""
    for key, value in tree.get(ATTRIBUTES, {}).items():
        group.attrs[key] = _attribute(value)
    for key, value in tree.items():
        if key == ATTRIBUTES:
            continue
        if isinstance(value, Mapping):
            yield from _datasets(group.create_group(key), value, (*path, key))
        else:
            yield "/".join((*path, key)), value, _dataset(group, key, value)


def _attribute(value: Any) -> Any:
    """Returns a value as an attribute holds it: names as an array of texts, other trees as JSON."""
    import h5py

    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return np.array(value, h5py.string_dtype())
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def _dataset(group: Any, key: str, tensor: Tensor) -> int:
    """Makes a data set with room for its values, and returns where that is."""
    from h5py import Dataset, h5d, h5p, h5s, h5t

    low = tensor.dtype == DTYPES["bfloat16"]
    stored: Any = np.dtype("V2") if low else tensor.dtype.newbyteorder("<")
    how = h5p.create(h5p.DATASET_CREATE)
    how.set_layout(h5d.CONTIGUOUS)
    how.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5d.FILL_TIME_NEVER)
    how.set_obj_track_times(False)
    space = h5s.create_simple(tensor.shape)
    dataset = Dataset(h5d.create(group.id, None, h5t.py_create(stored, logical=True), space, how))
    group[key] = dataset
    if low:
        dataset.attrs["dtype"] = "bfloat16"
    return dataset.id.get_offset() or 0  # nowhere if it has no values


def _faults(tree: Tree) -> Iterator[tuple[str, str]]:
    if not isinstance(tree, Mapping):
        yield "isn't a dict of groups", type(tree).__name__
        return
    for path, leaf in walk(tree):
        name = "/".join(map(str, path))
        if ATTRIBUTES in path or leaf == {}:
            continue
        if any(not isinstance(key, str) or not key or "/" in key or key == "." for key in path):
            yield "can't be a name", name
        elif not isinstance(leaf, Tensor):
            yield f"is {type(leaf).__name__}", name
        elif leaf.dtype.kind not in _KINDS and leaf.dtype.name != "bfloat16":
            yield f"is {leaf.dtype}, which the format lacks", name
