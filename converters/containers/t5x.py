"""Container `t5x`: T5X's own checkpoints from before Orbax, one msgpack index and a zarr folder per partitioned array.

It reads versions 2 and 3 and writes version 3. Input: a step's folder, or a run's:

    <run>/checkpoint_<step>/checkpoint                  msgpack {version, optimizer: {target, state, ...}}
    <run>/checkpoint_<step>/<dotted path>/.zarray, 0.0  arrays that were partitioned

Output: the tree below `optimizer`, arrays of either place as tensors.
Source: T5X t5x/checkpoints.py, `Checkpointer`, `VERSION`; t5x/partitioning.py for what is partitioned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgpack

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence, write_cut
from statekit.converters.containers.step_folders import (
    FOLDER,
    INDEX,
    array_names,
    find_step,
    sighted,
    step_checkpoint,
    step_prefix,
)
from statekit.converters.formats.msgpack.reader import parse
from statekit.converters.formats.zarr.array import Header, open_array
from statekit.converters.formats.zarr.headers import Arrays, header_json
from statekit.converters.formats.zarr.stores import FolderStore
from statekit.converters.formats.zarr.writer import chunk_shape, encoded_chunks, header_bytes, header_for
from statekit.errors import FormatError, UsageError
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.files.safetensors import sharded
from statekit.files.sections import CutPoints, Section
from statekit.files.source import Files, opening
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tensor import Tensor, nbytes
from statekit.tensors.tree import tensor_names, walk

VERSION = 3
_FIRST_VERSION = 2
_STATES = ("state", "param_states")
"""Where the index keeps what belongs to the parameters, under their paths."""
_MAX_INLINE = 2**30
"""The largest array that msgpack can hold at once. Source: flax/serialization.py, `MAX_CHUNK_SIZE`."""
_SECTION_BYTES = 2**31
"""Bytes of arrays in a section at most: each array has a folder of its own anyway."""


@dataclass(frozen=True)
class T5XFolder:
    """T5X checkpoints of the legacy generation."""

    name: str = "t5x"
    title: str = "T5X checkpoint_<step> folders: msgpack index and zarr arrays (versions 2 and 3)"
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = "folder"
    entries: tuple[str, ...] = (INDEX,)

    def detect(self, path: Place) -> Evidence | None:
        if (step_folder := sighted(path, "legacy")) is None:
            return None
        where = step_folder.path if step_folder.path.is_file() else step_folder.path / INDEX
        return Evidence(20, f"{where} is a msgpack map that begins as T5X's does")

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Parses the index and the arrays' headers."""
        step_folder = find_step(path, step, "legacy")
        index = step_folder.path if step_folder.path.is_file() else step_folder.path / INDEX
        with opening(path, budget) as files:
            wrapper = parse(files.source(index))
            version = _version(wrapper, index)
            arrays = Arrays(FolderStore(index.parent, files), bf16_as_uint16=version < VERSION)
            tree, findings, prefixes = arrays.with_tensors(wrapper["optimizer"])
            unread = [key for key in wrapper if key not in ("version", "optimizer")]
            findings += tuple(
                Finding(f"the index also holds {key!r}, which isn't read", str(index)) for key in unread
            )
            meta = {"generation": "legacy", "version": version}
            read = {INDEX} | {prefix.partition("/")[0] for prefix in prefixes}
            return step_checkpoint(self.name, step_folder, tree, meta, read, findings, files)

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes `checkpoint_<step>/`, arrays first and the index last."""
        write_cut(self, encoded, stage)

    def image(self, encoded: Encoded, target: Place, cut: CutPoints) -> list[Section]:
        """Returns runs of arrays, each array a folder."""
        prefix = step_prefix(target, encoded.step, FOLDER)
        folders, partitioned = array_names(encoded.tree), _partitioned(encoded.tree)
        arrays = {name: tensor for name, tensor in tensor_names(encoded.tree).items() if name in partitioned}
        parts = sharded(arrays, cut.limit(_SECTION_BYTES))
        return [_arrays_section(f"arrays-{i:05}", prefix, folders, part) for i, part in enumerate(parts)]

    def join(self, encoded: Encoded, stage: Stage, cut: CutPoints, records: Mapping[str, Any]) -> None:
        """Writes the index, with the arrays that stand in it."""
        prefix = step_prefix(stage.target, encoded.step, FOLDER)
        packer = _Packer(encoded.tree, stage)
        head = msgpack.Packer().pack_map_header(2) + msgpack.packb("version") + msgpack.packb(VERSION)
        packed = head + msgpack.packb("optimizer") + packer.packed(encoded.tree)
        with stage.file(f"{prefix}{INDEX}") as output:
            output.write(packed)


def _version(wrapper: Any, index: Place) -> int:
    version = wrapper.get("version") if isinstance(wrapper, dict) else None
    if (
        not isinstance(wrapper, dict)
        or not isinstance(wrapper.get("optimizer"), dict)
        or type(version) is not int
    ):
        raise FormatError(
            "The index isn't that of a T5X checkpoint.",
            place=index,
            expected="a map with version and optimizer",
            found=", ".join(map(str, list(wrapper)[:10]))
            if isinstance(wrapper, dict)
            else type(wrapper).__name__,
        )
    if not _FIRST_VERSION <= version <= VERSION:
        raise FormatError(
            "The checkpoint has a version that no T5X reads.",
            place=index,
            expected=f"{_FIRST_VERSION} or {VERSION}",
            found=version,
        )
    return version


def _partitioned(tree: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the arrays that T5X keeps in zarr.

    These are the parameters, what the state holds for one in its own shape, and what is too large for the index. Of one
    element a state's array is taken for a placeholder.
    """
    params = {path: leaf.shape for path, leaf in walk(tree.get("target") or {}) if isinstance(leaf, Tensor)}
    names = {f"target/{'/'.join(map(str, path))}" for path in params}
    for path, leaf in walk(tree):
        if isinstance(leaf, Tensor):
            like_param = path[:2] == _STATES and params.get(path[2:-1]) == leaf.shape != (1,)
            if like_param or nbytes(leaf) > _MAX_INLINE:
                names.add("/".join(map(str, path)))
    return frozenset(names)


class _Packer:
    """Packs a tree into the index, which refers to the arrays that lie beside it."""

    def __init__(self, tree: Mapping[str, Any], stage: Stage) -> None:
        self._stage = stage
        self._folders, self._partitioned = array_names(tree), _partitioned(tree)

    def packed(self, node: Any, path: tuple[str, ...] = ()) -> bytes:
        """Returns a part of the tree as msgpack."""
        if isinstance(node, Mapping):
            parts = [msgpack.Packer().pack_map_header(len(node))]
            for key, child in node.items():
                parts += [msgpack.packb(key), self.packed(child, (*path, key))]
            return b"".join(parts)
        name = "/".join(path)
        if not isinstance(node, Tensor):
            if node is None or isinstance(node, (bool, int, float, str, bytes)):
                return bytes(msgpack.packb(node))
            raise UsageError("T5X can't hold this value.", place=name, found=type(node).__name__)
        if name in self._partitioned:
            return bytes(msgpack.packb(_spec(self._folders[name], node)))
        data = b"".join(self._stage.stream(name, node))
        array = msgpack.packb([list(node.shape), node.dtype.name, data])
        return bytes(msgpack.packb(msgpack.ExtType(1, array)))


def _arrays_section(
    section: str, prefix: str, folders: Mapping[str, str], arrays: Mapping[str, Tensor]
) -> Section:
    """Returns a section of arrays; `join` needs nothing of it."""

    def write(stage: Stage) -> None:
        for name, tensor in arrays.items():
            header, folder = _header(tensor), f"{prefix}{folders[name]}"
            with stage.file(f"{folder}/.zarray") as output:
                output.write(header_bytes(header))
            for key, pieces in encoded_chunks(stage, name, tensor, header):
                with stage.file(f"{folder}/{key}") as output:
                    output.writelines(pieces)

    def read(path: Place, files: Files, record: Any) -> dict[str, Tensor]:
        store = FolderStore(path / prefix if prefix else path, files)
        return {
            name: open_array(store, folders[name], _header(tensor), name) for name, tensor in arrays.items()
        }

    return Section(section, arrays, write, read, files=tuple(f"{prefix}{folders[name]}/" for name in arrays))


def _header(tensor: Tensor) -> Header:
    return header_for(tensor, "gzip", chunk_shape(tensor.shape, tensor.dtype.itemsize))


def _spec(folder: str, tensor: Tensor) -> dict[str, Any]:
    """Returns what the index holds of an array that lies beside it."""
    stated = header_json(_header(tensor))
    return {
        "driver": "zarr",
        "dtype": tensor.dtype.name,
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": {name: stated[name] for name in ("chunks", "compressor", "shape")},
    }


CONTAINER = T5XFolder()
