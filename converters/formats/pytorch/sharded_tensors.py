"""FSDP1's tensors that ranks share, as `torch.save` pickles them: a ShardedTensor says where each of its pieces lies.

FullyShardedDataParallel gives them under StateDictType.SHARDED_STATE_DICT. A rank's file has the pieces of that rank,
each with its first index and its size along every axis. It has these numbers of the other ranks' pieces too.

Input: the record of a ShardedTensor, of each rank. Output: the tensor that the pieces make up.

Source: pytorch/pytorch torch/distributed/_shard/sharded_tensor/api.py, `ShardedTensor.__getstate__`;
torch/distributed/_shard/metadata.py, `ShardMetadata`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statekit.errors import CorruptError, FormatError
from statekit.tensors.boxes import Agreed, Box, Joined, tiling_fault
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import Record, Tree

_CLASS = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"


@dataclass(frozen=True)
class Pieces:
    """What one rank has of a tensor.

    Attributes:
        shape: The shape of the whole.
        own: The rank's pieces, each with its box.
        boxes: Where the pieces of all ranks lie.
    """

    shape: Shape
    own: Sequence[tuple[Box, Tensor]]
    boxes: tuple[Box, ...]

    def alone(self) -> Tensor | None:
        """Returns the rank's piece where it is the whole tensor; None where it is less."""
        return next((tensor for _, tensor in self.own if tensor.shape == self.shape), None)


def is_sharded(node: Tree) -> bool:
    """Tells whether a record is that of a ShardedTensor."""
    return isinstance(node, Record) and node.name == _CLASS


def is_sharded_class(name: str) -> bool:
    """Tells whether a class in a pickle is that of such tensors."""
    return name == _CLASS


def pieces_of(node: Record, place: str) -> Pieces:
    """Takes the record of a ShardedTensor apart.

    Raises:
        FormatError: It isn't described as such.
    """
    local, metadata, *_ = node.state if len(row_of(node.state)) > 1 else (None, None)
    described = attributes(metadata)
    shape = counts_of(described.get("size"))
    shards, everywhere = row_of(local), row_of(described.get("shards_metadata"))
    pieces = [(_box(attributes(shard).get("metadata")), attributes(shard).get("tensor")) for shard in shards]
    boxes = tuple(_box(entry) for entry in everywhere)
    tensors = [
        (box, tensor) for box, tensor in pieces if isinstance(tensor, Tensor) and tensor.shape == box[1]
    ]
    fault = tiling_fault(shape, boxes, place)
    if fault or len(tensors) != len(pieces) or not all(box in boxes for box, _ in pieces):
        raise FormatError(
            "A ShardedTensor isn't described as such.",
            place=place,
            expected="pieces with their first index and size, among those of all ranks",
            found=fault or f"{len(tensors)} of {len(pieces)} pieces of this rank",
        )
    return Pieces(shape, tensors, boxes)


def joined_pieces(ranks: Sequence[Pieces], place: str, remedy: str) -> Tensor:
    """Returns a tensor made of the pieces of all ranks; a piece that several ranks have is compared when it is read.

    Raises:
        CorruptError: Ranks contradict each other, or a piece is missing.
    """
    first, same = ranks[0], dict[Box, list[Tensor]]()
    for box, tensor in (piece for pieces in ranks for piece in pieces.own):
        same.setdefault(box, []).append(tensor)
    if fault := _fault(ranks, same):
        raise CorruptError(
            "The ranks' pieces don't make up a ShardedTensor.",
            place=place,
            expected=f"{len(first.boxes)} pieces of one dtype, as on rank 0, of shape {list(first.shape)}",
            found=fault,
            remedy=remedy,
        )
    filled = [box for box in same if math.prod(box[1])] or [*same][:1]
    pieces = {box: same[box][0] if len(same[box]) == 1 else Agreed(tuple(same[box]), place) for box in filled}
    return Joined({box[0]: tensor for box, tensor in pieces.items()}, first.shape)


def _fault(ranks: Sequence[Pieces], same: Mapping[Box, Sequence[Tensor]]) -> str:
    """Returns what is wrong with the pieces of all ranks, by their boxes; "" if nothing is."""
    boxes = ranks[0].boxes
    lacking = [box for box in boxes if math.prod(box[1]) and box not in same]
    dtypes = {tensor.dtype.name for tensors in same.values() for tensor in tensors}
    if lacking:
        return f"no piece at {list(lacking[0][0])}"
    if any(rank.boxes != boxes for rank in ranks):
        return "pieces at other places on another rank"
    return "" if len(dtypes) == 1 else ", ".join(sorted(dtypes)) or "no piece"


def attributes(node: Tree) -> Mapping[str, Any]:
    """Returns the attributes of an object; those in slots stand behind those in its dict."""
    state = node.state if isinstance(node, Record) else None
    parts = state if isinstance(state, tuple) else (state,)
    return {key: value for part in parts if isinstance(part, Mapping) for key, value in part.items()}


def _box(metadata: Tree) -> Box:
    inside = attributes(metadata)
    return counts_of(inside.get("shard_offsets")), counts_of(inside.get("shard_sizes"))


def row_of(node: Tree) -> Sequence[Any]:
    """Returns a list or tuple; an empty one in the place of something else."""
    return node if isinstance(node, (list, tuple)) else ()


def counts_of(node: Tree) -> Shape:
    """Returns a row of sizes or places; an empty one where it is something else."""
    numbers = row_of(node)
    return tuple(numbers) if all(type(n) is int and 0 <= n < 2**48 for n in numbers) else ()
