"""Writes TensorFlow's checkpoints: one data file in the order of names, the index, and the text file that names it.

Source: tensorflow/tensorflow, core/util/tensor_bundle/tensor_bundle.cc, `BundleWriter`; python/training/saver.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from statekit.converters.formats.crc import crc32c
from statekit.converters.formats.tensor_bundle.entries import (
    STRING,
    BundleEntry,
    code_of,
    entry_bytes,
    header,
    slice_key,
    string_bytes,
)
from statekit.converters.formats.tensor_bundle.table import masked, write_table
from statekit.errors import Faults, FormatError
from statekit.files.stage import Stage
from statekit.tensors.slices import Extent, bounds, parse_spec
from statekit.tensors.tensor import Shape, Tensor, index_shape
from statekit.tensors.tree import Tree

STATE_FILE = "checkpoint"
"""The text file that names the newest checkpoint of a folder."""


@dataclass(frozen=True)
class _Leaf:
    """A tensor or string to be written: its entry's key, and for a slice its place in the whole."""

    key: bytes
    value: Any
    label: str
    code: int
    shape: Shape
    name: bytes = b""
    full: Shape = ()
    extent: Extent | None = None


def write_bundle(tree: Tree, step: int, stage: Stage) -> None:
    """Writes `model.ckpt-<step>` in one shard, byte for byte as TensorFlow 1's Saver does.

    Args:
        tree: Tensors, bytes, lists of bytes and dicts of slices by name.
        step: For the prefix.
        stage: Where to.

    Raises:
        FormatError: A name or dtype that the format can't hold; lists every one.
    """
    prefix = f"model.ckpt-{step}"
    leaves = list(_leaves(tree))
    with stage.file(f"{prefix}.data-00000-of-00001") as output:
        index: dict[bytes, bytes] = {b"": header(1)}
        whole: dict[bytes, BundleEntry] = {}
        at = 0
        for leaf in leaves:
            crc = size = 0
            if isinstance(leaf.value, Tensor):
                for block in stage.stream(leaf.label, leaf.value):
                    output.write(block)
                    crc, size = crc32c(block, crc), size + len(block)
            else:
                data, crc = string_bytes(leaf.value)
                output.write(data)
                size = len(data)
            entry = BundleEntry(leaf.code, leaf.shape, 0, at, size, masked(crc))
            at += size
            index[leaf.key] = entry_bytes(entry)
            if leaf.extent is not None:
                known = whole.setdefault(leaf.name, BundleEntry(leaf.code, leaf.full))
                whole[leaf.name] = replace(known, slices=(*known.slices, leaf.extent))
    index |= {name: entry_bytes(entry) for name, entry in whole.items()}
    with stage.file(f"{prefix}.index") as output:
        output.write(write_table(index))
    with stage.file(STATE_FILE) as output:
        named = f'model_checkpoint_path: "{prefix}"\nall_model_checkpoint_paths: "{prefix}"\n'
        output.write(named.encode("ascii"))


def _leaves(tree: Tree) -> Iterator[_Leaf]:
    """Yields what is to be written, in the order of names."""
    if not isinstance(tree, Mapping):
        raise FormatError("A TensorFlow checkpoint is a flat dict of names.", found=type(tree).__name__)
    faults = Faults()
    leaves: list[_Leaf] = []
    for label, value in sorted(tree.items(), key=lambda item: str(item[0]).encode("utf-8", "replace")):
        name = str(label).encode("utf-8", "replace")
        if not name or name.startswith(b"\0") or not isinstance(label, str):
            faults.add("can't be a name", repr(label))
        elif isinstance(value, bytes):
            leaves.append(_Leaf(name, value, label, STRING, ()))
        elif isinstance(value, list) and all(isinstance(one, bytes) for one in value):
            leaves.append(_Leaf(name, value, label, STRING, (len(value),)))
        elif isinstance(value, Mapping):
            leaves += _slices(label, value, faults)
        elif not isinstance(value, Tensor) or (code := code_of(value.dtype)) is None:
            kind = getattr(value, "dtype", type(value).__name__)
            faults.add(f"is {kind}, which the format lacks", label)
        else:
            leaves.append(_Leaf(name, value, label, code, value.shape))
    faults.check(FormatError, "A TensorFlow checkpoint can't hold these")
    yield from leaves


def _slices(label: str, parts: Mapping[str, Any], faults: Faults) -> Iterator[_Leaf]:
    name = label.encode("utf-8")
    for spec, value in parts.items():
        named = parse_spec(spec)
        if named is None or not isinstance(value, Tensor) or (code := code_of(value.dtype)) is None:
            faults.add("isn't a slice of a tensor", f"{label}/{spec}")
            continue
        full, extent = named
        if index_shape(bounds(extent, full)) != value.shape:
            faults.add(f"has shape {value.shape}", f"{label}/{spec}")
            continue
        yield _Leaf(slice_key(name, extent), value, f"{label}/{spec}", code, value.shape, name, full, extent)
