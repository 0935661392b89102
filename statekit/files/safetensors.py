"""The safetensors file format: a proven header, tensors read block by block, and a streaming writer.

A file is: the header's length as 8 bytes little-endian; the header, a JSON object in UTF-8; the tensors' bytes,
little-endian, in C order, one after the other. Statekit's own arrays lie in such files, in neutral checkpoints and in
recordings; hence it stands here and not with the formats of other systems.
Source: safetensors, README.md section "Format", and `safetensors/src/tensor.rs`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, TypeVar

import numpy as np

from statekit.errors import CorruptError, Faults, FormatError
from statekit.files.source import Counts, File, Files, bytes_at, opening, record
from statekit.files.tree import Place, StoredPlace
from statekit.pipeline import empty
from statekit.tensors.digest import bytes_digest
from statekit.tensors.tensor import (
    DTYPES,
    Array,
    DType,
    Index,
    Shape,
    Stored,
    Tensor,
    dtype_name,
    index_shape,
    nbytes,
)
from statekit.tensors.tree import MAX_NAME_BYTES, strict_json

_T = TypeVar("_T")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
MAX_HEADER_BYTES = 100_000_000
"""The largest header, in bytes. Source: safetensors, `MAX_HEADER_SIZE`."""
MAX_RANK = 64
"""Axes of an array at most. Source: NumPy 2, `NPY_MAXDIMS`."""
_COUNT = 64
"""Bytes of a tensor that is read from a store together with all that are as small, such as counts of updates."""
_NODES, _NODES_OF_ENTRY = 8, 2
"""Values of a tree that a tensor counts for, with what describes it; and that an entry of the metadata does."""

_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_DTYPES = {spelling: DTYPES[name] for name, spelling in _NAMES.items()}


@dataclass(frozen=True)
class OpenFile:
    """An opened safetensors file.

    Attributes:
        tensors: Tensor by name, in the header's order.
        metadata: The header's `__metadata__`.
        header_digest: BLAKE3 of everything before the tensors' bytes.
        close: Closes the file; the tensors can't be read from then on. One among a checkpoint's is closed with these.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    header_digest: str
    close: Callable[[], None]


@dataclass(frozen=True)
class _Extent:
    shape: Shape
    dtype: DType
    start: int
    stop: int


def open_safetensors(path: Place, files: Files | None = None) -> OpenFile:
    """Opens a file and proves its header, by our own rules and by the safetensors library.

    Args:
        path: The file.
        files: Those of the checkpoint that it belongs to; None if it is read by itself.

    Raises:
        NotFoundError: No such file.
        FormatError: The header breaks the format, or the file can't be read.
        CorruptError: The file is truncated or longer than its header says.
        RefusedError: Not a regular file, or a header beyond the limits.
    """
    if files is None:
        with opening() as opened:
            return replace(open_safetensors(path, opened), close=opened.close)
    source = files.source(path)
    head = _head(source)
    with source.account.passing() as taken:
        taken.hold(len(head), "The header of a safetensors file", f"{path}")
        document = strict_json(head[8:], path, taken)
        metadata, extents = _parsed(document, source.size - len(head), path)
    nodes = _NODES * len(extents) + _NODES_OF_ENTRY * len(metadata)
    source.account.nodes(nodes, "The header of a safetensors file", f"{path}")
    source.account.hold(
        sum(len(key) + len(text) for key, text in metadata.items()), "Its metadata", f"{path}"
    )
    with source.account.passing() as copy_account:  # the library parses the header once more
        copy_account.hold(len(head), "The header of a safetensors file", f"{path}")
        copy_account.nodes(nodes, "The header of a safetensors file", f"{path}")
        _proven_by_library(source, head)
    sizes = ((len(head) + extent.start, extent.stop - extent.start) for extent in extents.values())
    counts = Counts(source, ((start, size) for start, size in sizes if size <= _COUNT))
    tensors = {name: _stored(source, name, extent, len(head), counts) for name, extent in extents.items()}
    return OpenFile(tensors, metadata, bytes_digest(head), lambda: None)


def save_safetensors(
    tensors: Mapping[str, Tensor],
    output: BinaryIO,
    stream: Callable[[str, Tensor], Iterable[memoryview]],
    metadata: Mapping[str, str],
) -> str:
    """Writes a file, holding one block in memory at a time, and returns the digest of its header.

    Tensors stand by falling size of an element, then as given, so that each is aligned for readers that map the file.

    Args:
        tensors: Tensor by name.
        output: The new file.
        stream: Gives a tensor's bytes: little-endian, C order.
        metadata: For the header's `__metadata__`.

    Raises:
        FormatError: A name or dtype that the format can't hold.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    head = _header(ordered, metadata)
    output.write(head)
    for name, tensor in ordered.items():
        for block in stream(name, tensor):
            output.write(block)
    return bytes_digest(head)


def sharded(
    items: Mapping[str, _T], limit: int, size_of: Callable[[Any], int] = nbytes
) -> Iterator[dict[str, _T]]:
    """Yields tensors in their order, in parts of at most `limit` bytes; a larger tensor is a part by itself.

    Args:
        items: By name.
        limit: Bytes.
        size_of: Gives the bytes of an item that isn't a tensor.
    """
    shard: dict[str, _T] = {}
    total = 0
    for name, item in items.items():
        size = size_of(item)
        if shard and total + size > limit:
            yield shard
            shard, total = {}, 0
        shard[name] = item
        total += size
    if shard:
        yield shard


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    faults = Faults((fault, name) for name, tensor in tensors.items() if (fault := _unwritable(name, tensor)))
    faults.check(FormatError, "A safetensors file can't hold these tensors")
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        stop = start + nbytes(tensor)
        dtype = _NAMES[dtype_name(tensor.dtype)]
        document[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(
            "A safetensors header would be too long.", expected=MAX_HEADER_BYTES, found=len(text)
        )
    return struct.pack("<Q", len(text)) + text


def _unwritable(name: str, tensor: Tensor) -> str:
    if dtype_name(tensor.dtype) not in _NAMES:
        return f"has dtype {dtype_name(tensor.dtype)}, which the format lacks"
    return _name_fault(name)


def _name_fault(name: str) -> str:
    if name == "__metadata__" or _CONTROL.search(name):
        return f"has an unusable name, {name!r}"
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        return f"has a name that isn't Unicode, {name!r}"
    return f"has a name of {size} bytes, more than {MAX_NAME_BYTES}" if size > MAX_NAME_BYTES else ""


def _head(source: File) -> bytes:
    length = int.from_bytes(bytes_at(source, 0, 8), "little")
    return record(source, 0, 8 + length, 8 + MAX_HEADER_BYTES, "The header of a safetensors file")


def _parsed(document: Any, data_bytes: int, path: Place) -> tuple[dict[str, str], dict[str, _Extent]]:
    if not isinstance(document, dict):
        raise FormatError("A header isn't a JSON object of tensors.", place=path)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError("A header's __metadata__ isn't a map from string to string.", place=path)
    extents, faults = {}, Faults()
    for name, entry in document.items():
        fault = _name_fault(name) or _entry_fault(entry)
        if fault:
            faults.add(fault, name)
        else:
            start, stop = entry["data_offsets"]
            extents[name] = _Extent(tuple(entry["shape"]), _DTYPES[entry["dtype"]], start, stop)
    if not faults:
        faults += _cover_faults(extents, data_bytes)
    faults.check(FormatError, "A safetensors header can't be trusted", place=path)
    return metadata, extents


def _entry_fault(entry: Any) -> str:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return "doesn't have exactly dtype, shape and data_offsets"
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        return f"has dtype {entry['dtype']!r}; statekit reads {', '.join(_DTYPES)}"
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _naturals(shape) or len(shape) > MAX_RANK or not _naturals(offsets) or len(offsets) != 2:
        return "has a shape or data_offsets that aren't lists of natural numbers"
    item = _DTYPES[entry["dtype"]].itemsize
    if math.prod(max(n, 1) for n in shape) * item >= 2**63:
        return f"has an absurd shape, {shape}"
    if offsets[1] - offsets[0] != math.prod(shape) * item:
        return f"needs {math.prod(shape) * item} bytes for shape {shape}, its data_offsets are {offsets}"
    return ""


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _cover_faults(extents: Mapping[str, _Extent], data_bytes: int) -> Iterator[tuple[str, str]]:
    """Yields where the tensors don't lie one after the other, or leave bytes over."""
    position = 0
    for name, extent in sorted(extents.items(), key=lambda item: (item[1].start, item[1].stop)):
        if extent.start != position:
            kind = "a hole before it" if extent.start > position else "an overlap with another tensor"
            yield f"has {kind}: it starts at {extent.start}, expected {position}", name
        position = extent.stop
    if position != data_bytes:
        yield f"the tensors end at {position}, the data at {data_bytes}", "the end of the file"


def _proven_by_library(source: File, head: bytes) -> None:
    """Has the library open a file; of one in a store, a file of the same head and size that holds nothing else."""
    from safetensors import SafetensorError, safe_open

    try:
        with tempfile.NamedTemporaryFile() if isinstance(source.path, StoredPlace) else nullcontext() as copy:
            if copy is not None:
                copy.write(head)
                copy.truncate(source.size)
                copy.flush()
            with safe_open(source.path if copy is None else copy.name, framework="np"):
                pass
    except (SafetensorError, OSError) as error:
        raise FormatError("The safetensors library refuses a file.", place=source.path, found=error) from None


def _stored(source: File, name: str, extent: _Extent, data_start: int, counts: Counts) -> Stored:

    def fetch(index: Index) -> Array:
        if extent.stop - extent.start <= _COUNT:
            counts.bring()
        block: Array = empty(index_shape(index), extent.dtype)
        into = block.reshape(-1).view(np.uint8).data
        for offset, run in _runs(extent, index):
            source.read_into(data_start + extent.start + offset, into[:run])
            into = into[run:]
        if extent.dtype == np.bool_ and block.view(np.uint8).max(initial=0) > 1:
            raise CorruptError(
                "A bool tensor holds a byte that is neither 0 nor 1.", place=f"{name} in {source.path}"
            )
        return block.byteswap() if sys.byteorder == "big" else block

    return Stored(extent.shape, extent.dtype, fetch, name, source.place)


def _runs(extent: _Extent, index: Index) -> Iterator[tuple[int, int]]:
    """Yields offset and length, in bytes, of the contiguous pieces of a block, in C order."""
    shape, item = extent.shape, extent.dtype.itemsize
    cut = len(shape)  # axes from here on are taken whole
    while cut and index[cut - 1] == slice(0, shape[cut - 1]):
        cut -= 1
    strides = [math.prod(shape[axis + 1 :]) * item for axis in range(len(shape))]
    if math.prod(index_shape(index)) == 0:
        return
    if cut == 0:
        yield 0, math.prod(shape) * item
        return
    inner = index[cut - 1]
    for outer in itertools.product(*(range(s.start, s.stop) for s in index[: cut - 1])):
        start = (
            sum(i * stride for i, stride in zip(outer, strides, strict=False))
            + inner.start * strides[cut - 1]
        )
        yield start, (inner.stop - inner.start) * strides[cut - 1]
