"""Digests: BLAKE3 of tensors, files and JSON documents.

A tensor's digest covers its values alone: little-endian, C order, without shape or dtype, which stand beside it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from blake3 import blake3

from statekit.pipeline import ahead, in_turn, passed, working
from statekit.tensors.tensor import BLOCK_BYTES, Array, Tensor, blocks, chunks, nbytes
from statekit.tensors.tree import Record, Tree


def little_endian(block: Array) -> memoryview:
    """Returns the values of a block as bytes, little-endian and in C order, without copying them."""
    ordered = np.ascontiguousarray(block.byteswap() if sys.byteorder == "big" else block)
    return ordered.reshape(-1).view(np.uint8).data


def tensor_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """Yields the values of a tensor, little-endian and in C order, at most BLOCK_BYTES at a time.

    The next block is read (and inflated) by another thread while the caller is busy with the last one. The bytes may
    be used before the checksums of the format are compared, which is done at the end. Blocks of small chunks are
    decoded side by side.
    """
    chunk = getattr(tensor, "chunk", None)
    if chunk is not None and math.prod(chunk) * tensor.dtype.itemsize <= BLOCK_BYTES:
        return map(little_endian, in_turn(tensor.read, blocks(tensor)))
    read = passed(map(little_endian, chunks(tensor, BLOCK_BYTES)))
    return ahead(read) if nbytes(tensor) > BLOCK_BYTES else read


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
        with working("digest"):
            hasher.update(block)
        if on_block is not None:
            on_block(len(block))
    return hasher.hexdigest()


def tensor_digests(
    tensors: Mapping[str, Tensor], on_block: Callable[[str, int], object]
) -> Iterator[tuple[str, str]]:
    """Yields the name and BLAKE3 digest of each tensor, in their order.

    Those that are decoded from chunks are read several at once, others one after the other, as they lie in files.

    Args:
        tensors: What to read.
        on_block: Told the name of a tensor, and the number of bytes of each block.
    """
    for is_chunked, group in groupby(
        tensors.items(), lambda item: getattr(item[1], "chunk", None) is not None
    ):
        if not is_chunked:
            for name, tensor in group:
                yield name, tensor_digest(tensor, partial(on_block, name))
            continue
        chunked = dict(group)
        for (name, tensor), digest in zip(
            chunked.items(), in_turn(tensor_digest, chunked.values()), strict=True
        ):
            on_block(name, nbytes(tensor))
            yield name, digest


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


def records_digest(*trees: Tree) -> str | None:
    """Returns the BLAKE3 digest of what trees hold besides the values of tensors, in the order in which it stands.

    It is that of a text in which every part stands with its kind and size, so that other trees have another text.

    Returns:
        64 lowercase hexadecimal digits; None if something isn't a part of a tree.
    """
    hasher = blake3()
    try:
        for tree in trees:
            _feed(hasher.update, tree)
    except TypeError:
        return None
    return str(hasher.hexdigest())


def _feed(update: Callable[[bytes], object], node: Any) -> None:
    if isinstance(node, Mapping):
        update(b"map %d " % len(node))
        for key, part in node.items():
            _feed(update, key)
            _feed(update, part)
    elif isinstance(node, (list, tuple)):
        update(b"%s %d " % (b"list" if isinstance(node, list) else b"tuple", len(node)))
        for part in node:
            _feed(update, part)
    elif isinstance(node, Record):
        update(b"record ")
        _feed(update, node.name)
        _feed(update, node.args)
        _feed(update, node.state)
    elif isinstance(node, (str, bytes)):
        data = node.encode("utf-8", "surrogatepass") if isinstance(node, str) else node
        update(b"%s %d " % (b"text" if isinstance(node, str) else b"bytes", len(data)))
        update(data)
    elif node is None or isinstance(node, (bool, int)):
        update(b"%s " % str(node).encode("ascii"))
    elif isinstance(node, float):
        update(b"float %s " % node.hex().encode("ascii"))
    elif isinstance(node, Tensor):
        update(b"tensor ")
    else:
        raise TypeError(f"{type(node)} isn't a part of a tree")
