"""The header of zarr arrays of format 2, `.zarray`, as T5X and Orbax write it.

Source: zarr-specs, "Zarr storage specification version 2"; the `"bfloat16"` data type is an extension of TensorStore.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from statekit.converters.formats.zarr.array import Header, checked_header
from statekit.errors import FormatError
from statekit.tensors.tensor import DTYPES, DType

FILE = ".zarray"
COMPRESSORS = ("gzip", "zlib", "zstd")
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def parse_header(data: bytes, place: str) -> Header:
    """Reads `.zarray`.

    Raises:
        FormatError: It isn't an array of format 2, in C order, without filters, of a known dtype and compressor.
    """
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError("An array's header isn't JSON.", place=place, found=str(error)[:200]) from error
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
        compressor, level, _fill(parsed.get("fill_value"), place), separator,
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


def _fill(value: object, place: str) -> float | None:
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
