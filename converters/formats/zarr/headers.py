"""The headers of zarr arrays: `.zarray` of format 2 and `zarr.json` of format 3, as T5X and Orbax write them.

Source: zarr-specs, "Zarr storage specification version 2"; "Zarr core specification version 3", codecs `bytes`,
`gzip`, `zstd`, `sharding_indexed`; the data type `bfloat16` is an extension of TensorStore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from statekit.budget import Account
from statekit.converters.formats.storage import checked_shape
from statekit.converters.formats.zarr.array import Header, Shards, checked_header
from statekit.errors import FormatError
from statekit.tensors.tensor import DTYPES, DType, dtype_named
from statekit.tensors.tree import loose_json, strict_json

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
