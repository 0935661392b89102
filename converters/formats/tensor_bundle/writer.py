"""Writes TensorFlow's checkpoints: data files in the order of names, the index, and the text file that names it.

Source: tensorflow/tensorflow, core/util/tensor_bundle/tensor_bundle.cc, `BundleWriter`; python/training/saver.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

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
from statekit.files.safetensors import sharded
from statekit.files.sections import CutPoints, Rows, Section
from statekit.files.source import Files
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.slices import Extent, bounds, parse_spec
from statekit.tensors.tensor import Shape, Tensor, index_shape, nbytes
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

    def bytes(self) -> int:
        """Returns its size, if it is a tensor: strings are small."""
        return nbytes(self.value) if isinstance(self.value, Tensor) else 0


Read = Callable[[Place, str, int, Mapping[str, BundleEntry], Files], Mapping[str, Tensor]]
"""Opens tensors of a data file: below a path, by the prefix, the number of data files, and the entries by name."""


@dataclass(frozen=True)
class Bundle:
    """A checkpoint `model.ckpt-<step>`; in one data file it is byte for byte what TensorFlow 1's Saver writes.

    Attributes:
        tree: Tensors, bytes, lists of bytes and dicts of slices by name.
        step: For the prefix.
        read: Opens what was written.
    """

    tree: Tree
    step: int
    read: Read

    def image(self, cut: CutPoints) -> list[Section]:
        """Returns the data files; each gives `join` the place, size and checksum of what lies in it.

        Raises:
            FormatError: A name or dtype that the format can't hold; lists every one.
        """
        shards = self._shards(cut)
        return [self._section(number, len(shards), leaves) for number, leaves in enumerate(shards)]

    def join(self, stage: Stage, cut: CutPoints, records: Mapping[str, Any]) -> None:
        """Writes the index, and the text file that names it."""
        shards = self._shards(cut)
        index: dict[bytes, bytes] = {b"": header(len(shards))}
        whole: dict[bytes, BundleEntry] = {}
        for number, leaves in enumerate(shards):
            record = records[self._file(number, len(shards))]
            for leaf, entry in zip(leaves, _entries(number, leaves, record), strict=True):
                index[leaf.key] = entry_bytes(entry)
                if leaf.extent is not None:
                    before = whole.setdefault(leaf.name, BundleEntry(leaf.code, leaf.full))
                    whole[leaf.name] = replace(before, slices=(*before.slices, leaf.extent))
        index |= {name: entry_bytes(entry) for name, entry in whole.items()}
        with stage.file(f"{self._prefix}.index") as output:
            output.write(write_table(index))
        with stage.file(STATE_FILE) as output:
            named = f'model_checkpoint_path: "{self._prefix}"\nall_model_checkpoint_paths: "{self._prefix}"\n'
            output.write(named.encode("ascii"))

    @property
    def _prefix(self) -> str:
        return f"model.ckpt-{self.step}"

    def _file(self, number: int, count: int) -> str:
        return f"{self._prefix}.data-{number:05d}-of-{count:05d}"

    def _shards(self, cut: CutPoints) -> list[list[_Leaf]]:
        leaves = {f"{i}": leaf for i, leaf in enumerate(_leaves(self.tree))}
        if cut.bytes is None:
            return [[*leaves.values()]]
        return [[*part.values()] for part in sharded(leaves, cut.bytes, _Leaf.bytes)] or [[]]

    def _section(self, number: int, count: int, leaves: Sequence[_Leaf]) -> Section:
        tensors = {leaf.label: leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)}

        def write(stage: Stage) -> list[list[int]]:
            with stage.file(self._file(number, count)) as output:
                return [_written(leaf, stage, output) for leaf in leaves]

        def read(path: Place, files: Files, record: Any) -> Mapping[str, Tensor]:
            entries = {
                leaf.label: entry
                for leaf, entry in zip(leaves, _entries(number, leaves, record), strict=True)
                if leaf.label in tensors
            }
            return self.read(path, self._prefix, count, entries, files)

        return Section(self._file(number, count), tensors, write, read, record=Rows, rows=len(leaves))


def _written(leaf: _Leaf, stage: Stage, output: BinaryIO) -> list[int]:
    """Writes a tensor or strings; returns their size, and their masked CRC-32C."""
    if not isinstance(leaf.value, Tensor):
        data, crc = string_bytes(leaf.value)
        output.write(data)
        return [len(data), masked(crc)]
    crc = size = 0
    for block in stage.stream(leaf.label, leaf.value):
        output.write(block)
        crc, size = crc32c(block, crc), size + len(block)
    return [size, masked(crc)]


def _entries(number: int, leaves: Sequence[_Leaf], record: Sequence[Sequence[int]]) -> Iterator[BundleEntry]:
    """Yields the entries of what lies in a data file, one after the other."""
    start = 0
    for leaf, (size, crc) in zip(leaves, record, strict=True):
        yield BundleEntry(leaf.code, leaf.shape, number, start, size, crc)
        start += size


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
        elif isinstance(value, list) and all(isinstance(text, bytes) for text in value):
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
