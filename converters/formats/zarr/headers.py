"""What describes zarr arrays, and the tensors it makes of them.

Arrays have headers: `.zarray` of format 2 and `zarr.json` of format 3, as T5X and Orbax write them. A msgpack index has
leaves: arrays inside the file, TensorStore specs, Orbax placeholders. A spec inside a checkpoint is foreign text that
could name any driver and any place. Only its relative path is taken, and shape, dtype and chunks where the array's own
header is lost; everything else is checked and thrown away.

Source: zarr-specs, "Zarr storage specification version 2"; "Zarr core specification version 3", codecs `bytes`,
`gzip`, `zstd`, `sharding_indexed`; the data type `bfloat16` is an extension of TensorStore. T5X t5x/checkpoints.py,
`_read_ts`, `_maybe_update_ts_from_file_to_gcs`; google/orbax orbax/checkpoint/_src/serialization, `PLACEHOLDER_PREFIX`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypeAlias, TypedDict

from statekit.budget import Account
from statekit.converters.formats.msgpack.reader import Inline
from statekit.converters.formats.storage import checked_shape
from statekit.converters.formats.zarr.array import Header, Shards, absent_chunks, checked_header, open_array
from statekit.converters.formats.zarr.stores import Store
from statekit.errors import CorruptError, Faults, FormatError, RefusedError, some
from statekit.files.checkpoint import Finding
from statekit.files.tree import checked_key
from statekit.tensors.tensor import DTYPES, DType, Shape, Stored, dtype_named
from statekit.tensors.tree import MAX_DEPTH, Tree, loose_json, strict_json
from statekit.tensors.typed import Name, Natural, typed

ZARRAY = ".zarray"
COMPRESSORS = ("gzip", "zlib", "zstd")
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def parse_zarray(data: bytes, place: str, account: Account | None = None) -> Header:
    """Reads `.zarray`.

    Args:
        data: Its text.
        place: Where it stands.
        account: What parsing it draws on; one of its own if None.

    Raises:
        FormatError: It isn't an array of format 2, in C order, without filters, of a known dtype and compressor.
    """
    parsed = loose_json(data, place, account)
    if not isinstance(parsed, dict):
        raise FormatError("An array's header isn't a JSON object.", place=place)
    expected = {"zarr_format": 2, "order": "C", "filters": None}
    faults = [f"{name} {parsed.get(name)!r}" for name, value in expected.items() if parsed.get(name) != value]
    separator = parsed.get("dimension_separator", ".")
    if separator not in (".", "/"):
        faults.append(f"dimension_separator {separator!r}")
    if faults:
        raise FormatError(
            "An array has a form that statekit doesn't read.",
            place=place,
            expected="zarr_format 2, order 'C', filters None, dimension_separator '.' or '/'",
            found=", ".join(faults)[:400],
        )
    compressor, level = parse_compressor(parsed.get("compressor"), place)
    return checked_header(
        parsed.get("shape"), parsed.get("chunks"), stored_dtype(parsed.get("dtype"), place), place,
        compressor, level, _fill_or_none(parsed.get("fill_value"), place), separator,
    )  # fmt: skip


def parse_compressor(value: object, place: str) -> tuple[str | None, int]:
    """Returns name and level of a compressor as `.zarray` or a spec states it; (None, 0) for null.

    Raises:
        FormatError: statekit doesn't know it.
    """
    if value is None:
        return None, 0
    name = value.get("id") if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or name not in COMPRESSORS:
        raise FormatError(
            "An array is compressed in a way that statekit doesn't read.",
            place=place,
            expected=f"null, {', '.join(COMPRESSORS)}",
            found=repr(name)[:200],
        )
    level = value.get("level", 1)
    return str(name), level if type(level) is int else 1


def stored_dtype(value: object, place: str) -> DType:
    """Returns the dtype of a zarr data type, such as `<f4`, `|b1` or `bfloat16`.

    Raises:
        FormatError: It is structured, big-endian, or unknown.
    """
    if isinstance(value, str) and value in DTYPES and DTYPES[value].kind == "V":
        return DTYPES[value]
    if isinstance(value, str) and len(value) <= 4 and value[:1] in ("<", "|"):
        for dtype in DTYPES.values():
            if dtype.kind != "V" and dtype.newbyteorder("<").str[1:] == value[1:]:
                return dtype
    raise FormatError(
        "An array has a data type that statekit doesn't read.",
        place=place,
        expected="<f4, <i4, |b1, bfloat16, ...",
        found=repr(value)[:200],
    )


def _fill_or_none(value: object, place: str) -> float | None:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str) and value in _SPECIAL:
        return _SPECIAL[value]
    raise FormatError(
        "An array has a fill value that statekit doesn't read.", place=place, found=repr(value)[:200]
    )


def header_json(header: Header) -> dict[str, Any]:
    """Returns the content of `.zarray`, as TensorStore writes it."""
    return {
        "chunks": list(header.chunks),
        "compressor": header.compressor and {"id": header.compressor, "level": header.level},
        "dimension_separator": header.separator,
        "dtype": header.dtype.name if header.dtype.kind == "V" else header.dtype.newbyteorder("<").str,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(header.shape),
        "zarr_format": 2,
    }


ZARR_JSON = "zarr.json"
_KNOWN = {
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs",
    "attributes", "dimension_names", "storage_transformers",
}  # fmt: skip
_COMPRESSORS = ("gzip", "zstd")
_INDEX_CODECS = (["bytes"], ["bytes", "crc32c"])


def parse_zarr_json(data: bytes, place: str, account: Account | None = None) -> Header:
    """Reads `zarr.json`.

    Args:
        data: Its text.
        place: Where it stands.
        account: As in `parse_zarray`.

    Raises:
        FormatError: It isn't an array of format 3 on a regular grid, of a known dtype and known codecs.
    """
    parsed = strict_json(data, place, account)
    if not isinstance(parsed, dict):
        raise FormatError("An array's header isn't a JSON object.", place=place)
    unknown = [
        name
        for name, value in parsed.items()
        if name not in _KNOWN and not (isinstance(value, dict) and value.get("must_understand") is False)
    ]
    if (parsed.get("zarr_format"), parsed.get("node_type")) != (3, "array") or unknown:
        raise _unread(place, "an array of zarr_format 3", f"{parsed.get('zarr_format')!r}, {unknown}")
    if parsed.get("storage_transformers"):
        raise _unread(place, "no storage transformers", parsed["storage_transformers"])
    grid, grid_of = _named(parsed.get("chunk_grid"), place)
    if grid != "regular":
        raise _unread(place, "a regular chunk grid", grid)
    keys, separator = _key_encoding(parsed.get("chunk_key_encoding"), place)
    codecs = _codecs(parsed.get("codecs"), place)
    outer, shards = grid_of.get("chunk_shape"), None
    if [name for name, _ in codecs] == ["sharding_indexed"]:
        chunks, codecs, shards = _sharding(codecs[0][1], checked_shape(outer, place, 1), place)
    else:
        chunks = outer
    compressor, level = _compression(codecs, place)
    return checked_header(
        parsed.get("shape"), chunks, dtype_named(parsed.get("data_type", ""), place), place,
        compressor, level, _fill(parsed.get("fill_value"), place), separator, keys, shards,
    )  # fmt: skip


def _sharding(
    configuration: Mapping[str, Any], outer: tuple[int, ...], place: str
) -> tuple[Any, list[tuple[str, Mapping[str, Any]]], Shards]:
    """Returns the shape of the chunks in a shard, their codecs, and how they lie."""
    chunks = checked_shape(configuration.get("chunk_shape"), place, 1)
    if len(chunks) != len(outer) or any(n % c for n, c in zip(outer, chunks, strict=True)):
        raise _unread(place, f"chunks that divide a shard of shape {outer}", chunks)
    index = [name for name, _ in _codecs(configuration.get("index_codecs"), place)]
    where = configuration.get("index_location", "end")
    if index not in _INDEX_CODECS or where not in ("start", "end"):
        raise _unread(place, "an index of bytes, with crc32c or not, at start or end", f"{index}, {where!r}")
    codecs = _codecs(configuration.get("codecs"), place)
    return list(chunks), codecs, Shards(outer, where == "end", "crc32c" in index)


def _codecs(value: Any, place: str) -> list[tuple[str, Mapping[str, Any]]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value or len(value) > 8:
        raise _unread(place, "a list of codecs", value)
    codecs = [_named(codec, place) for codec in value]
    if any(
        name == "bytes" and configuration.get("endian", "little") != "little"
        for name, configuration in codecs
    ):
        raise _unread(place, "little-endian bytes", value)
    return codecs


def _compression(codecs: list[tuple[str, Mapping[str, Any]]], place: str) -> tuple[str | None, int]:
    names = [name for name, _ in codecs]
    if names == ["bytes"]:
        return None, 0
    if len(names) != 2 or names[0] != "bytes" or names[1] not in _COMPRESSORS:
        raise _unread(place, f"codecs bytes, then nothing, {' or '.join(_COMPRESSORS)}", names)
    level = codecs[1][1].get("level", 1)
    return names[1], level if type(level) is int else 1


def _key_encoding(value: Any, place: str) -> tuple[str, str]:
    """Returns what a chunk's key begins with, and what joins its parts."""
    name, configuration = _named(value, place)
    separator = configuration.get("separator", "/" if name == "default" else ".")
    if name not in ("default", "v2") or separator not in ("/", "."):
        raise _unread(place, "chunk keys default or v2, with / or .", value)
    return "c" if name == "default" else "", separator


def _named(value: Any, place: str) -> tuple[str, Mapping[str, Any]]:
    """Returns name and configuration of an extension point, which may be just a name."""
    name = value.get("name") if isinstance(value, Mapping) else value
    configuration = value.get("configuration", {}) if isinstance(value, Mapping) else {}
    if not isinstance(name, str) or not isinstance(configuration, Mapping):
        raise _unread(place, "a name with its configuration", value)
    return name, configuration


def _fill(value: object, place: str) -> float:
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str) and value in _SPECIAL:
        return _SPECIAL[value]
    raise _unread(place, "a number as fill value", value)


def _unread(place: str, expected: str, value: object) -> FormatError:
    return FormatError(
        "An array has a form that statekit doesn't read.",
        place=place,
        expected=expected,
        found=repr(value)[:300],
    )


Parse: TypeAlias = Callable[[bytes, str, Account], Header]

FORMATS: dict[int, tuple[str, Parse]] = {2: (ZARRAY, parse_zarray), 3: (ZARR_JSON, parse_zarr_json)}
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
        faults = Faults(_shared_places(places))
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
                note = f"{file} is missing; shape, dtype and chunks are taken from the index"
                findings.append(Finding(note, where, kind="absent"))
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


def _shared_places(places: Sequence[ArrayPlace]) -> Iterator[tuple[str, str]]:
    """Yields the places that several arrays are said to lie in: each has a folder of its own."""
    names: dict[str, list[str]] = {}
    for place in places:
        names.setdefault(place.prefix, []).append(place.name)
    for prefix, several in names.items():
        if len(several) > 1:
            yield f"is the place of {len(several)} arrays: {some(several)}", prefix


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
