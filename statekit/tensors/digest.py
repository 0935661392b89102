"""Digests: BLAKE3 of tensors, files and JSON documents.

A tensor's digest covers its values alone: little-endian, C order, without shape or dtype, which stand beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from blake3 import blake3

from statekit.tensors.tensor import BLOCK_BYTES, Array, Tensor, chunks, nbytes

_END = memoryview(b"")


def little_endian(block: Array) -> memoryview:
    """Returns the values of a block as bytes, little-endian and in C order, without copying them."""
    ordered = np.ascontiguousarray(block.byteswap() if sys.byteorder == "big" else block)
    return ordered.reshape(-1).view(np.uint8).data


def tensor_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """Yields the values of a tensor, little-endian and in C order, at most BLOCK_BYTES at a time.

    The next block is read (and inflated) by another thread while the caller is busy with the last one.
    """
    read = map(little_endian, chunks(tensor, BLOCK_BYTES))
    return _ahead(read) if nbytes(tensor) > BLOCK_BYTES else read


def _ahead(blocks: Iterator[memoryview]) -> Iterator[memoryview]:
    from concurrent.futures import (
        ThreadPoolExecutor,
    )  # it brings logging along, which most calls have no use for

    with ThreadPoolExecutor(1, "statekit-read-ahead") as reader:
        coming = reader.submit(next, blocks, _END)
        while block := coming.result():
            coming = reader.submit(next, blocks, _END)
            yield block


def bytes_digest(data: bytes) -> str:
    """Returns the BLAKE3 digest of bytes: 64 lowercase hexadecimal digits."""
    return blake3(data).hexdigest()


def tensor_digest(tensor: Tensor, on_block: Callable[[int], object] | None = None) -> str:
    """Reads a tensor block by block and returns the BLAKE3 digest of its values.

    Args:
        tensor: What to read.
        on_block: Told the number of bytes of each block.
    """
    hasher = blake3()
    for block in tensor_bytes(tensor):
        hasher.update(block)
        if on_block is not None:
            on_block(len(block))
    return hasher.hexdigest()


def canonical_json(document: Any) -> bytes:
    """Returns a JSON document as digests see it: sorted keys, no spaces, ASCII, no NaN.

    Raises:
        ValueError: The document holds NaN or an infinity.
    """
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def json_digest(document: Any) -> str:
    """Returns the BLAKE3 digest of a JSON document in canonical form."""
    return bytes_digest(canonical_json(document))
