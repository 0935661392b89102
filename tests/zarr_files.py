"""Zarr arrays on disk, written here without the code under test, and a stage that needs no commit."""

from __future__ import annotations

import gzip
import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
import zstandard

from statekit.files.homes import LocalHome
from statekit.files.stage import Stage
from statekit.tensors.digest import tensor_bytes
from statekit.tensors.tensor import Array, Tensor

ENCODERS: dict[str | None, Callable[[bytes], bytes]] = {
    None: bytes,
    "gzip": lambda data: gzip.compress(data, 1, mtime=0),
    "zlib": zlib.compress,
    "zstd": lambda data: zstandard.ZstdCompressor(level=1).compress(data),
}


def header(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str = "<f4") -> dict[str, Any]:
    """Returns `.zarray` as T5X writes it."""
    return {
        "chunks": list(chunks),
        "compressor": {"id": "gzip", "level": 1},
        "dimension_separator": ".",
        "dtype": dtype,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }


def write_array(
    folder: Path,
    array: Array,
    chunks: tuple[int, ...],
    compressor: str | None = "gzip",
    dtype: str = "<f4",
    separator: str = ".",
) -> Path:
    """Writes an array as a zarr folder, chunk by chunk, edges padded with ones."""
    folder.mkdir(parents=True)
    stated = compressor and {"id": compressor, "level": 1}
    document = header(array.shape, chunks, dtype)
    document |= {"compressor": stated, "dimension_separator": separator}
    (folder / ".zarray").write_text(json.dumps(document))
    grid = [range(-(-n // c)) for n, c in zip(array.shape, chunks, strict=True)]
    for position in itertools.product(*grid):
        part = array[tuple(slice(i * c, (i + 1) * c) for i, c in zip(position, chunks, strict=True))]
        full = np.ones(chunks, array.dtype)
        full[tuple(slice(0, n) for n in part.shape)] = part
        path = folder / (separator.join(map(str, position)) or "0")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(ENCODERS[compressor](full.tobytes()))
    return folder


def header3(
    shape: tuple[int, ...], shard: tuple[int, ...], codecs: list[Any], dtype: str = "float32"
) -> dict[str, Any]:
    """Returns `zarr.json` as Orbax writes it."""
    return {
        "chunk_grid": {"configuration": {"chunk_shape": list(shard)}, "name": "regular"},
        "chunk_key_encoding": {"name": "default"},
        "codecs": codecs,
        "data_type": dtype,
        "fill_value": 0.0,
        "node_type": "array",
        "shape": list(shape),
        "zarr_format": 3,
    }


def sharding(chunks: tuple[int, ...], compressor: str | None = "zstd", where: str = "end") -> dict[str, Any]:
    """Returns the codec that puts chunks into shards."""
    little = {"configuration": {"endian": "little"}, "name": "bytes"}
    inner = [little, *([{"name": compressor, "configuration": {"level": 1}}] if compressor else [])]
    configuration = {
        "chunk_shape": list(chunks),
        "codecs": inner,
        "index_codecs": [little, {"name": "crc32c"}],
    }
    return {"name": "sharding_indexed", "configuration": configuration | {"index_location": where}}


def shard_bytes(parts: list[bytes | None], at_end: bool = True) -> bytes:
    """Returns chunks with their index; None is a chunk that is absent."""
    size = 16 * len(parts) + 4
    entries, body, offset = b"", b"", 0 if at_end else size
    for part in parts:
        place = (2**64 - 1, 2**64 - 1) if part is None else (offset + len(body), len(part))
        entries += struct.pack("<QQ", *place)
        body += part or b""
    index = entries + struct.pack("<I", google_crc32c.value(entries))
    return body + index if at_end else index + body


def write_sharded(
    folder: Path,
    array: Array,
    shard: tuple[int, ...],
    chunks: tuple[int, ...],
    compressor: str | None = "zstd",
    where: str = "end",
    absent: tuple[int, ...] = (),
) -> Path:
    """Writes an array of format 3, edges padded with ones. `absent` numbers chunks of each shard that are left out."""
    folder.mkdir(parents=True)
    document = header3(array.shape, shard, [sharding(chunks, compressor, where)], array.dtype.name)
    (folder / "zarr.json").write_text(json.dumps(document))
    for position in itertools.product(*(range(-(-n // c)) for n, c in zip(array.shape, shard, strict=True))):
        part = array[tuple(slice(i * c, (i + 1) * c) for i, c in zip(position, shard, strict=True))]
        full = np.ones(shard, array.dtype)
        full[tuple(slice(0, n) for n in part.shape)] = part
        cuts = itertools.product(*(range(0, n, c) for n, c in zip(shard, chunks, strict=True)))
        pieces = [
            ENCODERS[compressor](
                full[tuple(slice(i, i + c) for i, c in zip(cut, chunks, strict=True))].tobytes()
            )
            for cut in cuts
        ]
        path = folder.joinpath("c", *map(str, position))
        path.parent.mkdir(parents=True, exist_ok=True)
        present = [None if i in absent else piece for i, piece in enumerate(pieces)]
        path.write_bytes(shard_bytes(present, where == "end"))
    return folder


@dataclass
class PlainStage(Stage):
    """Writes files directly, and remembers what was streamed."""

    streamed: dict[str, bytes] = field(default_factory=dict)

    @contextmanager
    def file(self, relative: str = "", synced: bool = True, seeks: bool = False) -> Iterator[BinaryIO]:
        path = Path(self.path / relative)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as output:
            yield output

    def stream(self, name: str, tensor: Tensor) -> Iterator[memoryview]:
        blocks = []
        for block in tensor_bytes(tensor):
            blocks.append(block)
            yield block
        self.streamed[name] = b"".join(blocks)


def plain_stage(path: Path) -> PlainStage:
    """Returns a stage that writes at a path."""
    path.mkdir(parents=True, exist_ok=True)
    return PlainStage(LocalHome(path, path, "folder"))
