"""Writes a tree as an HDF5 file, as `reader` reads it and as Keras lays it out: contiguous, without filters.

Source: keras-team/keras, keras/src/saving/saving_lib.py, `H5IOStore.__setitem__`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from statekit.errors import Faults, FormatError
from statekit.files.checkpoint import ATTRIBUTES
from statekit.files.stage import Stage
from statekit.tensors.tensor import DTYPES, Tensor, blocks, index_shape
from statekit.tensors.tree import Tree, walk

MANIFEST = "statekit"
"""Attribute of the file that holds the manifest."""
_KINDS = "biuf"


def write_hdf5(tree: Tree, target: Any, stage: Stage, apart: int = 1) -> dict[str, Any]:
    """Writes a tree, and the manifest of what was streamed, which `Stage.complete` has to complete.

    Args:
        tree: Dicts, tensors at the leaves, plain attributes under `@`.
        target: A path where nothing is, or an empty file opened for reading and writing.
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
    with h5py.File(target, "x" if isinstance(target, str) else "w") as file:
        _write(file["/"], tree, (), stage)
        manifest = stage.manifest(apart)
        file.attrs[MANIFEST] = manifest_bytes(manifest).decode("ascii")
    return manifest


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """Returns a manifest as it stands in a file."""
    return json.dumps(manifest, sort_keys=True).encode("ascii")


def _write(group: Any, tree: Mapping[str, Any], path: tuple[str, ...], stage: Stage) -> None:
    for key, value in tree.get(ATTRIBUTES, {}).items():
        group.attrs[key] = json.dumps(value) if isinstance(value, (dict, list)) else value
    for key, value in tree.items():
        if key == ATTRIBUTES:
            continue
        if isinstance(value, Mapping):
            _write(group.create_group(key), value, (*path, key), stage)
        else:
            _dataset(group, key, value, "/".join((*path, key)), stage)


def _dataset(group: Any, key: str, tensor: Tensor, name: str, stage: Stage) -> None:
    low = tensor.dtype == DTYPES["bfloat16"]
    stored: Any = np.dtype("V2") if low else tensor.dtype
    dataset = group.create_dataset(key, shape=tensor.shape, dtype=stored)
    if low:
        dataset.attrs["dtype"] = "bfloat16"
    for index, block in zip(blocks(tensor), stage.stream(name, tensor), strict=True):
        values = np.frombuffer(block, stored).reshape(index_shape(index))
        if tensor.shape:
            dataset[index] = values
        else:
            dataset[()] = values[()]


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
