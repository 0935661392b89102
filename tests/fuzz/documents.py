"""Readers of documents: JSON of ours and of others, gin, hyperparameters as people write them."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from fuzz.changing import changed_bytes, changed_tree
from fuzz.reader import PLACE, Reader, used
from statekit.budget import Account
from statekit.files.source import Files, Held
from statekit.tensors.tensor import Tensor, in_memory
from statekit.tensors.tree import Record, to_json


def json_text(tree: Any, random: Random) -> bytes:
    """Returns a tree as JSON; now and then a key stands twice, and what JSON lacks becomes text."""
    doubled = random.choice((0, 0, 0, 0, 0, 0, 1, 2))

    def put(node: Any) -> str:
        nonlocal doubled
        if isinstance(node, dict):
            pairs = [(k if isinstance(k, str) else f"{k!r}"[:50], v) for k, v in node.items()]
            if doubled and pairs and random.randrange(3) == 0:
                doubled -= 1
                pairs.append(random.choice(pairs))
            return "{" + ",".join(f"{json.dumps(key)}:{put(value)}" for key, value in pairs) + "}"
        if isinstance(node, (list, tuple)):
            return "[" + ",".join(map(put, node)) + "]"
        return json.dumps(f"{node!r}"[:50] if isinstance(node, (Record, Tensor, bytes)) else node)

    return put(tree).encode("ascii")


def json_changed(data: bytes, random: Random) -> bytes:
    """Changes a JSON document in its structure."""
    return json_text(changed_tree(_parsed(data), random), random)


_parsed = cache(json.loads)
_CHANGES = (json_changed, json_changed, changed_bytes)


# statekit's own


def manifest() -> dict[str, Any]:
    """Returns a small manifest, not sealed yet."""
    described = {"name": "params/w", "shape": [2], "dtype": "float32"}
    return {
        "format": "statekit-manifest",
        "version": 1,
        "tool": "statekit 0",
        "target": {"container": "statekit", "layout": "statekit", "step": 4},
        "source": {"container": "t5x", "step": 4},
        "state": {"optimizer": "adamw"},
        "options": {},
        "kept": {"extra": {}},
        "files": {"tensors-00001-of-00001.safetensors": {"bytes": 8, "blake3": "0" * 64}},
        "tensors": {"params/w": {"shape": [2], "dtype": "float32", "blake3": "0" * 64}},
        "tree": {"params": {"w": {"$tensor": described}}, "extra": {"$tuple": [1, {"$float": "nan"}]}},
    }


def resealed(data: bytes, random: Random) -> bytes:
    """Changes a manifest, and seals it again so that its digest fits."""
    changed = changed_tree({k: v for k, v in _parsed(data).items() if k != "digest"}, random)
    return seal(json_text(changed, random))


def seal(text: bytes) -> bytes:
    """Returns a manifest whose digest fits, if any digest can."""
    from statekit.tensors.digest import json_digest

    document = json.loads(text)
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        document = {**document, "digest": json_digest({k: v for k, v in document.items() if k != "digest"})}
    return json.dumps(document).encode("ascii")


def _read_manifest(data: bytes) -> object:
    from statekit.files.manifest import check_inside, parse, tensor_faults

    parsed = parse(data, PLACE)
    check_inside(Path(PLACE), parsed)
    return tensor_faults(parsed, {"params/w": in_memory(np.zeros(2, np.float32))})


# zarr, and the indices that lead to it

ZARRAY = {
    "chunks": [2, 3],
    "compressor": {"id": "gzip", "level": 1},
    "dtype": "<f4",
    "fill_value": None,
    "filters": None,
    "order": "C",
    "shape": [4, 6],
    "zarr_format": 2,
    "dimension_separator": ".",
}
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_ZARR3 = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4, 6],
    "data_type": "float32",
    "fill_value": 0.0,
    "attributes": {},
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "codecs": [_BYTES, {"name": "zstd", "configuration": {"level": 1}}],
    "dimension_names": None,
}
_SHARDING = {
    "chunk_shape": [2, 3],
    "codecs": [_BYTES],
    "index_codecs": [_BYTES, {"name": "crc32c"}],
    "index_location": "end",
}
_SHARDED = {
    **_ZARR3,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}},
    "codecs": [{"name": "sharding_indexed", "configuration": _SHARDING}],
}


@dataclass(frozen=True)
class Values:
    """A store in memory."""

    stored: Mapping[str, bytes]
    place: str = PLACE
    account: Account = field(default_factory=Account)

    def value(self, key: str) -> Held | None:
        from statekit.files.tree import checked_key

        checked_key(key, self.place)
        return Held(self.stored[key], f"{key} in {PLACE}", self.account) if key in self.stored else None

    def values(self, keys: Sequence[str]) -> Iterator[Held | None]:
        return map(self.value, keys)

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.stored.get(key) for key in keys]


@cache
def _chunks(kind: str) -> dict[str, bytes]:
    """Returns the chunks of a sample: of format 2, of format 3, or in a shard."""
    import gzip

    import zstandard

    from statekit.converters.formats.crc import crc32c

    raw = np.arange(6, dtype=np.float32).tobytes()
    places = [(i, k) for i in range(2) for k in range(2)]
    if kind == "2":
        return {f"{i}.{k}": gzip.compress(raw) for i, k in places}
    if kind == "3":
        return {f"c/{i}/{k}": zstandard.compress(raw) for i, k in places}
    index = b"".join(struct.pack("<QQ", 24 * i, 24) for i in range(4))
    return {"c/0/0": raw * 4 + index + struct.pack("<I", crc32c(index))}


def _kind(header: bytes) -> str:
    return "2" if b"chunk_grid" not in header else "shard" if b"sharding_indexed" in header else "3"


def _zarr_samples() -> list[bytes]:
    return [json.dumps(one).encode() for one in (ZARRAY, _ZARR3, _SHARDED)]


def _read_zarr(data: bytes, values: Mapping[str, bytes] | None = None) -> object:
    from statekit.converters.formats.zarr.array import absent_chunks, open_array
    from statekit.converters.formats.zarr.headers import parse_zarr_json, parse_zarray

    header = (parse_zarray if _kind(data) == "2" else parse_zarr_json)(data, PLACE)
    store = Values({f"w/{key}": value for key, value in (values or _chunks(_kind(data))).items()})
    return absent_chunks(store, "w", header), used({"w": open_array(store, "w", header, "w")})


def _chunk_samples() -> list[bytes]:
    headers = map(json.loads, _zarr_samples())
    chunks = [
        (header, *next(iter(_chunks(_kind(json.dumps(header).encode())).items()))) for header in headers
    ]
    return [json.dumps([header, key, chunk.hex()]).encode() for header, key, chunk in chunks]


def _changed_chunk(data: bytes, random: Random) -> bytes:
    """Changes the bytes of a chunk, which stand behind its header and its key."""
    header, key, chunk = _parsed(data)
    return json.dumps([header, key, changed_bytes(bytes.fromhex(chunk), random).hex()]).encode()


def _read_chunks(data: bytes) -> object:
    document, key, chunk = json.loads(data)
    header = json.dumps(document).encode()
    return _read_zarr(header, {**_chunks(_kind(header)), key: bytes.fromhex(chunk)})


_ARRAYS = ("target.dense.kernel", "target.dense.bias", "target.w", "target.x")


def _spec_samples() -> list[bytes]:
    kernel, bias, weight = (
        {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": array},
            "dtype": "float32",
            "metadata": {
                "shape": [4, 6],
                "chunks": [2, 3],
                "dtype": "<f4",
                "compressor": {"id": "gzip", "level": 1},
            },
        }
        for array in _ARRAYS[:3]
    )
    tree = {"a": kernel, "b": "PLACEHOLDER://target.x", "c": {"d": bias, "e": [1, weight]}}
    return [json.dumps(tree).encode()]


def _read_specs(data: bytes) -> object:
    from statekit.converters.formats.zarr.headers import Arrays
    from statekit.tensors.tree import strict_json

    tree, header = strict_json(data, PLACE), json.dumps(ZARRAY).encode()
    parts = {".zarray": header, **_chunks("2")}
    values = {f"{array}/{key}": value for array in _ARRAYS for key, value in parts.items()}
    return used(Arrays(Values(values)).with_tensors(tree)[0]) if isinstance(tree, dict) else None


def _leaf(kind: str, *keys: str | int, **more: Any) -> dict[str, Any]:
    path = [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in keys]
    return {"key_metadata": path, "value_metadata": {"value_type": kind, "skip_deserialize": False, **more}}


def _orbax_samples() -> list[bytes]:
    tree = {
        "('a',)": _leaf("jax.Array", "a", write_shape=[2, 3]),
        "('b', '0')": _leaf("scalar", "b", 0),
        "('b', '1')": _leaf("None", "b", 1, skip_deserialize=True),
        "('c',)": _leaf("string", "c"),
    }
    more = {
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": {"x": 1},
    }
    return [json.dumps({"tree_metadata": tree, **more}).encode()]


def _read_orbax(data: bytes) -> object:
    from statekit.converters.containers.orbax.metadata import parse, tree_of

    metadata = parse(data, PLACE)
    entries = metadata.entries()
    leaves = {i: 0 for i, entry in enumerate(entries) if entry.is_array or entry.kind == "string"}
    return json.dumps(
        [to_json(tree_of(entries, leaves, PLACE)), to_json(metadata.custom), metadata.zarr_format]
    )


# OCDBT: what our reader makes of a database, whatever tensorstore gives it


def _ocdbt_samples() -> list[bytes]:
    """Returns trees with what a database holds for them: by key how a read ends, and the bytes in hexadecimal."""
    header = {**ZARRAY, "shape": [2, 3], "compressor": None}
    text, chunk = json.dumps(header).encode().hex(), bytes(24).hex()
    entries = {f"('{name}',)": _leaf("jax.Array", name, write_shape=[2, 3]) for name in ("a", "b")}
    tree = {"tree_metadata": entries, "use_ocdbt": True, "use_zarr3": False}
    return [
        json.dumps(
            {
                "tree": {**tree, "store_array_data_equal_to_fill_value": complete},
                "database": {
                    **{f"{name}/.zarray": ["value", text] for name in ("a", "b")},
                    **{f"{name}/0.0": ["value", chunk] for name in ("a", "b")},
                },
            }
        ).encode()
        for complete in (True, False)
    ]


class _Database:
    """What stands for tensorstore's: a value, one that is large, none, one whose file is gone, or an error."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self._kept = kept

    def read(self, key: str, byte_range: slice | None = None) -> Any:
        stated = self._kept.get(key)
        ending, text = stated if isinstance(stated, list) and len(stated) == 2 else ("missing", "")
        data = binary(text)
        large = _LARGE if ending == "large" else 0

        def result() -> Any:
            if ending not in ("value", "large", "missing"):
                raise ValueError(f"{ending}: Error reading {key}")
            if byte_range is None:
                return SimpleNamespace(state=ending, value=data)
            if byte_range.start >= len(data) + large:
                raise ValueError("OUT_OF_RANGE: Requested byte range is not valid")
            behind = min(byte_range.stop, len(data) + large) - max(byte_range.start, len(data))
            return SimpleNamespace(state=ending, value=data[byte_range] + bytes(max(0, behind)))

        return SimpleNamespace(result=result)


_LARGE = 9 * 2**20
"""Bytes beyond which a value is read in spans, and more."""


def binary(text: object) -> bytes:
    """Returns the bytes that text means, or the text's own."""
    try:
        return bytes.fromhex(str(text))
    except ValueError:
        return str(text).encode("utf-8", "surrogatepass")


def _ending_changed(data: bytes, random: Random) -> bytes:
    """Changes how a read of a database ends, or its bytes."""
    document = json.loads(data)
    key = random.choice(list(document["database"]))
    ending, text = document["database"][key]
    if random.randrange(2):
        ending = random.choice(("value", "large", "missing", "NOT_FOUND", "OUT_OF_RANGE", "\ud800"))
    else:
        text = changed_bytes(bytes.fromhex(text), random).hex()
    document["database"][key] = [ending, text]
    return json.dumps(document).encode()


def _read_ocdbt(data: bytes) -> object:
    from statekit.converters.containers.orbax.metadata import parse, tree_of
    from statekit.converters.formats.zarr.headers import ArrayPlace, Arrays
    from statekit.converters.formats.zarr.stores import OcdbtStore

    document = json.loads(data)
    document = document if isinstance(document, dict) else {}
    database = document.get("database")
    metadata = parse(json.dumps(document.get("tree")).encode(), PLACE)
    entries = metadata.entries()
    with Files() as files:
        store = OcdbtStore(PLACE, _Database(database if isinstance(database, dict) else {}), files)
        arrays = {i: entry for i, entry in enumerate(entries) if entry.is_array}
        places = [
            ArrayPlace("/".join(map(str, one.path)), one.array, written=one.written)
            for one in arrays.values()
        ]
        tensors, _ = Arrays(store, metadata.zarr_format, metadata.complete).open(places)
        leaves = {i: 0 for i, entry in enumerate(entries) if entry.kind == "string"}
        return used(tree_of(entries, {**leaves, **dict(zip(arrays, tensors, strict=True))}, PLACE))


# gin, and hyperparameters as people write them

GIN = b"""from t5x import adafactor
include 't5x/base.gin'
X = 0.8
Y = %X
NAMES = ('a', "b", [1, 2.5, None, True])
adafactor.Adafactor:
    decay_rate = %X
    step_offset = 0
    logical_factor_rules = @adafactor.standard_logical_factor_rules()
scope/adafactor.Adafactor.epsilon1 = 1e-30
adafactor.Adafactor.clipping_threshold = {'a': -1, 'b': (1, 2)}
# a comment
"""
_WORDS = (
    b"X = %X\n",
    b"Y = %X %Y\n",
    b"\tx = 1\n",
    b"adafactor.Adafactor.a = " + b"(" * 300 + b"\n",
    b"'''",
    b"\\\n",
    b" = ",
    b"adafactor.Adafactor.b = " + b"-" * 5000 + b"1\n",
    b"9" * 5000,
    b"1e999",
    b"0x",
    b"1_0",
    b"\xff",
    b"\xed\xa0\x80",
    b"\r",
    b"adafactor.Adafactor.c = " + b"[" * 100 + b"]" * 100 + b"\n",
    b"a/b/c.d = 1\n",
    b".",
    b":",
    b"=",
    b"   ",
    b"\n\n",
    b"\x0c",
    b"adafactor.Adafactor.d = [1] * 10 ** 9\n",
    b"b'a'",
    b"1j",
    b"...",
    b"{1, 2}",
    b"{[]: 1}",
    b"(",
    b"]",
    b"\xe2\x80\xa8",
    b"def f(): pass\n",
    b"f'{1}'",
    b"@f()",
    b"%",
    b"\0",
    b"{1: [2]}",
    b"'\\ud800'",
    b"'\\N{x}'",
    b"NaN",
    b"-Infinity",
)


def _changed_lines(data: bytes, random: Random) -> bytes:
    """Changes a text by its lines and words."""
    for _ in range(random.choice((1, 2, 3))):
        lines = data.split(b"\n")
        at, change = random.randrange(len(lines)), random.randrange(6)
        if change == 0:
            del lines[at]
        elif change == 1:
            lines.insert(at, random.choice(lines))
        elif change == 2:
            other = random.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif change == 3:
            lines[at] = random.choice((b" ", b"\t", b"    ")) + lines[at]
        else:
            cut = random.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:cut] + random.choice(_WORDS) + lines[at][cut if change == 4 else cut + 3 :]
        data = b"\n".join(lines) or b"\n"
    return data


def _read_gin(data: bytes) -> object:
    from statekit.converters.formats.hparams import decoded, read_gin

    settings = read_gin(decoded(data, PLACE), PLACE)
    return json.dumps([to_json(dict(settings.values)), dict(settings.references), settings.left_out])


def _hparams_samples() -> list[bytes]:
    pairs = (
        "decay_rate=0.8",
        "a.b=[1, 2, {'x': None}]",
        'factor_map={"kernel": ["ROW", null]}',
        "x=(1, -2.5e-3, True, word)",
    )
    return [pair.encode() for pair in pairs]


def _read_hparams(data: bytes) -> object:
    from statekit.converters.formats.hparams import read_hparams

    text = data.decode("utf-8", "surrogateescape")
    if text.endswith((".json", ".gin")):
        text += " "  # names no file
    return json.dumps(to_json(dict(read_hparams([text]).values)))


READERS = (
    Reader(
        "manifest", lambda: [seal(json.dumps(manifest()).encode())], _read_manifest, (resealed, *_CHANGES)
    ),
    Reader("zarr", cache(_zarr_samples), _read_zarr, _CHANGES),
    Reader("zarr chunks", cache(_chunk_samples), _read_chunks, (_changed_chunk,)),
    Reader("array specs", cache(_spec_samples), _read_specs, _CHANGES),
    Reader("orbax metadata", cache(_orbax_samples), _read_orbax, _CHANGES),
    Reader("ocdbt paths", cache(_ocdbt_samples), _read_ocdbt, (_ending_changed, json_changed, json_changed)),
    Reader("gin", lambda: [GIN], _read_gin, (_changed_lines, _changed_lines, changed_bytes)),
    Reader("hyperparameters", cache(_hparams_samples), _read_hparams, (_changed_lines, changed_bytes)),
)
