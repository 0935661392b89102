"""Zarr arrays on disk, written here without the code under test, and a stage that needs no commit."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard

from statekit.commit import Stage
from statekit.digest import tensor_bytes
from statekit.tensor import Array, Tensor

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


@dataclass
class PlainStage(Stage):
    """Writes files directly, and remembers what was streamed."""

    streamed: dict[str, bytes] = field(default_factory=dict)

    @contextmanager
    def file(self, relative: str = "") -> Iterator[BinaryIO]:
        path = self.path / relative
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
    return PlainStage(path, path, "folder")
