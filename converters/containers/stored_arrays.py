"""Turns the leaves of a msgpack index into tensors: arrays inside the file, TensorStore specs, Orbax placeholders.

A spec inside a checkpoint is foreign text that could name any driver and any place. Only its relative path is taken,
and shape, dtype and chunks where the array's own header is lost; everything else is checked and thrown away.
Source: T5X t5x/checkpoints.py, `_read_ts`, `_maybe_update_ts_from_file_to_gcs`; google/orbax
orbax/checkpoint/_src/serialization, `PLACEHOLDER_PREFIX`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypeAlias, TypedDict

from statekit.budget import Account
from statekit.converters.formats.msgpack.reader import Inline
from statekit.converters.formats.zarr.array import (
    Header,
    absent_chunks,
    checked_header,
    open_array,
)
from statekit.converters.formats.zarr.headers import (
    ZARR_JSON,
    ZARRAY,
    parse_compressor,
    parse_zarr_json,
    parse_zarray,
    stored_dtype,
)
from statekit.converters.formats.zarr.stores import Store, checked_key
from statekit.errors import CorruptError, Faults, RefusedError
from statekit.files.checkpoint import Finding
from statekit.tensors.tensor import DTYPES, Shape, Stored, dtype_named
from statekit.tensors.tree import MAX_DEPTH, Tree
from statekit.tensors.typed import Name, Natural, typed

Parse: TypeAlias = Callable[[bytes, str, Account], Header]

FORMATS: dict[int, tuple[str, Parse]] = {
    2: (ZARRAY, parse_zarray),
    3: (ZARR_JSON, parse_zarr_json),
}
"""For each format of zarr: the file that holds an array's header, and what reads it."""

_DRIVERS = ("file", "gfile", "gcs")
_SPEC_KEYS = {"driver", "kvstore", "metadata"}
_PLACEHOLDERS = ("PLACEHOLDER://", "AGGREGATED://")


class SpecStore(TypedDict):
    """Where a spec says that its array lies."""

    driver: Name
    path: NotRequired[Name]


class SpecMetadata(TypedDict, total=False):
    """What a spec says of its array; its compressor is checked as a header's is."""

    shape: list[Natural] | None
    chunks: list[Natural] | None
    dtype: Name | None
    compressor: Any


class Spec(TypedDict):
    """What is read of a TensorStore spec."""

    driver: Name
    kvstore: SpecStore
    metadata: SpecMetadata
    path: NotRequired[Name]
    dtype: NotRequired[Name | None]


@dataclass(frozen=True)
class ArrayPlace:
    """Where an array of a tree lies in a store.

    Attributes:
        name: Its native name.
        prefix: The start of its keys.
        header: What the index says of it, in case its own header is lost.
        written: The shape of the part that one device wrote, if it is said elsewhere; of the whole, where one wrote it.
    """

    name: str
    prefix: str
    header: Header | None = None
    written: Shape | None = None


def _is_part(part: Shape, shape: Shape) -> bool:
    """Tells whether an array may have been written in parts of a shape."""
    return len(part) == len(shape) and all(0 < n <= whole for n, whole in zip(part, shape, strict=True))


@dataclass(frozen=True)
class Arrays:
    """How the arrays of a tree are stored.

    Attributes:
        store: Where those outside the index lie.
        zarr_format: 2 or 3.
        complete: Whether every chunk was written, so that an absent one is damage and never the fill value.
        bf16_as_uint16: Whether uint16 arrays hold the bits of bfloat16, as T5X wrote them before June 2021.
    """

    store: Store
    zarr_format: int = 2
    complete: bool = False
    bf16_as_uint16: bool = False

    def with_tensors(self, tree: Tree) -> tuple[Tree, tuple[Finding, ...], set[str]]:
        """Replaces what the msgpack reader left at the leaves of a dict by tensors, in place.

        Returns:
            The tree; what was odd; the prefixes of all arrays in the store.

        Raises:
            RefusedError: A spec leads out of the checkpoint, or to another driver than local zarr.
            CorruptError: Headers are missing, or disagree with the index.
        """
        places, holders = [], []
        for holder, key, path in _leaves(tree):
            leaf, name = holder[key], "/".join(map(str, path))
            if isinstance(leaf, Inline):
                holder[key] = self._reread(leaf).tensor(name)
            elif (place := array_place(leaf, name, self.store.place)) is not None:
                places.append(place)
                holders.append((holder, key))
        tensors, findings = self.open(places)
        for (holder, key), tensor in zip(holders, tensors, strict=True):
            holder[key] = tensor
        return tree, findings, {place.prefix for place in places}

    def open(self, places: list[ArrayPlace]) -> tuple[list[Stored], tuple[Finding, ...]]:
        """Reads the headers of arrays and returns them as tensors, with what was odd.

        Raises:
            CorruptError: Headers are missing, or disagree with the index; lists every one.
        """
        file, parse = FORMATS[self.zarr_format]
        store = self.store
        headers = store.headers([f"{place.prefix}/{file}" for place in places])
        tensors: list[Stored] = []
        findings: list[Finding] = []
        faults = Faults()
        parsed: dict[bytes, Header] = {}  # layers repeat, so most headers do
        for place, data in zip(places, headers, strict=True):
            where = f"{store.place}/{place.prefix}"
            if data is not None and data not in parsed:
                with store.account.passing() as passing:
                    parsed[data] = self._reread(parse(data, f"{where}/{file}", passing))
            header = place.header if data is None else parsed[data]
            if header is None:
                faults.add(f"{file} is missing, and nothing else says shape and dtype", place.prefix)
                continue
            if data is None:
                what = f"{file} is missing; shape, dtype and chunks are taken from the index"
                findings.append(Finding(what, where, kind="absent"))
                header = self._reread(header)
            stated = place.header.shape if place.header is not None else place.written
            whole = place.header is not None or stated is None
            if stated not in (None, header.shape) and (whole or not _is_part(stated, header.shape)):
                faults.add(f"has shape {header.shape}, in the index {stated}", place.prefix)
            absent = absent_chunks(store, place.prefix, header)
            findings += [Finding("absent, read as fill", f"{where}/{key}", kind="absent") for key in absent]
            tensors.append(open_array(store, place.prefix, header, place.name))
        faults.check(
            CorruptError,
            "The checkpoint's arrays can't be trusted",
            place=store.place,
            remedy="copy the checkpoint again with its dotfiles: a glob such as * leaves .zarray out",
        )
        return tensors, tuple(findings)

    def _reread(self, array: Any) -> Any:
        """Returns an Inline or Header as it is meant: bits of bfloat16 as such, no fill where every chunk is stored."""
        if self.bf16_as_uint16 and array.dtype == DTYPES["uint16"]:
            array = replace(array, dtype=DTYPES["bfloat16"])
        return replace(array, fill=None) if self.complete and isinstance(array, Header) else array


def array_place(leaf: Any, name: str, store: str) -> ArrayPlace | None:
    """Returns where a leaf of an index says its array lies, or None if it isn't about an array."""
    if is_spec(leaf):
        return ArrayPlace(name, *_checked_spec(leaf, f"{name} in {store}"))
    if isinstance(leaf, str) and leaf.startswith(_PLACEHOLDERS):
        prefix = leaf.partition("://")[2].rstrip("/")
        checked_key(prefix, f"{name} in {store}")
        return ArrayPlace(name, prefix)
    return None


def is_spec(node: Any) -> bool:
    """Tells whether a node of an index is a TensorStore spec, the way T5X does."""
    return isinstance(node, Mapping) and node.keys() >= _SPEC_KEYS


def _checked_spec(spec: Mapping[str, Any], place: str) -> tuple[str, Header | None]:
    """Returns prefix and header of a spec."""
    checked = typed(spec, Spec, place, "A TensorStore spec has another form than T5X gives it")
    kvstore, metadata = checked["kvstore"], checked["metadata"]
    driver, path = kvstore["driver"], checked.get("path", kvstore.get("path"))
    if checked["driver"] != "zarr" or driver not in _DRIVERS or path is None:
        raise RefusedError(
            "A checkpoint asks to read an array in a way that isn't allowed.",
            place=place,
            expected=f"driver zarr over {', '.join(_DRIVERS)}, with a relative path",
            found=f"driver {checked['driver']!r} over {driver!r}, path {path!r}"[:300],
            remedy="don't use this checkpoint unless you know who made it",
        )
    prefix = path.rstrip("/")
    checked_key(prefix, place)
    return prefix, _spec_header(checked.get("dtype", metadata.get("dtype")), metadata, place)


def _spec_header(name: str | None, metadata: SpecMetadata, place: str) -> Header | None:
    shape, chunks = metadata.get("shape"), metadata.get("chunks")
    if shape is None or chunks is None or name is None or "compressor" not in metadata:
        return None
    dtype = dtype_named(name, place) if name in DTYPES else stored_dtype(name, place)
    compressor, level = parse_compressor(metadata["compressor"], place)
    return checked_header(shape, chunks, dtype, place, compressor, level)


def _leaves(tree: Tree) -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    """Yields holder, key and path of every leaf; a spec is one. The holder's value may be replaced."""
    stack: list[tuple[Any, tuple[Any, ...]]] = [(tree, ())]
    while stack:
        holder, path = stack.pop()
        children = list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))
        for key, child in reversed(children):
            if len(path) < MAX_DEPTH and isinstance(child, (dict, list)) and not is_spec(child):
                stack.append((child, (*path, key)))
        for key, child in children:
            if not isinstance(child, (dict, list)) or is_spec(child):
                yield holder, key, (*path, key)
