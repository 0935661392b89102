"""A live run in JAX as a checkpoint in memory, so that layouts decode it as they decode files."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from statekit.conversion import registry
from statekit.conversion.contracts import NO_HINTS
from statekit.errors import UsageError
from statekit.files.checkpoint import Checkpoint
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import (
    DTYPES,
    Array,
    DType,
    Index,
    Shape,
    common,
    index_shape,
    normal_index,
    within,
)
from statekit.tensors.tree import Tree

LIVE = Path("the live run")


@dataclass(frozen=True)
class LiveArray:
    """An array on whatever devices; of one that several processes have, the part of this one."""

    value: Any
    name: str

    @property
    def shape(self) -> Shape:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> DType:
        return DTYPES[np.dtype(self.value.dtype).name]

    @property
    def grain(self) -> Shape:
        return self.shape

    @property
    def parts(self) -> tuple[Index, ...] | None:
        """The blocks that this process has; None if it has everything."""
        if getattr(self.value, "is_fully_addressable", True) or self.value.is_fully_replicated:
            return None
        return tuple(index for index, _ in self._shards())

    def _shards(self) -> Iterator[tuple[Index, Any]]:
        """Yields the shards that this process has, each once: several of its devices may have the same."""
        indices: set[tuple[tuple[int, int], ...]] = set()
        for shard in self.value.addressable_shards:
            index = normal_index(shard.index, self.shape)
            if (key := tuple((cut.start, cut.stop) for cut in index)) not in indices:
                indices.add(key)
                yield index, shard.data

    def read(self, index: Index | None = None) -> Array:
        """Reads a block, shard by shard: nothing is gathered on a device.

        Raises:
            UsageError: This process hasn't all of the block.
        """
        bounds = normal_index(index, self.shape)
        if not isinstance(self.value, jax.Array):
            return np.ascontiguousarray(np.asarray(self.value)[bounds]).reshape(index_shape(bounds))
        block, filled = np.empty(index_shape(bounds), self.dtype), 0
        for place, data in self._shards():
            if (both := common(bounds, place)) is not None:
                block[within(both, bounds)] = np.asarray(data)[within(both, place)]
                filled += math.prod(index_shape(both))
        if filled != block.size:
            raise UsageError(
                "A block of an array isn't all in this process.",
                place=self.name,
                expected=f"{block.size} elements",
                found=f"{filled} on the devices of process {jax.process_index()}",
                remedy="read the blocks that it has, or gather the array first",
            )
        return block

    def to_json(self) -> dict[str, Any]:
        return {"op": "live", "name": self.name, "shape": list(self.shape), "dtype": self.dtype.name}


def variables_of(node: Any) -> Any:
    """Returns the variables of a module or an optimizer of Flax' nnx; anything else as it is."""
    nnx = sys.modules.get("flax.nnx")
    return nnx.state(node) if nnx is not None and isinstance(node, (nnx.Module, nnx.Optimizer)) else node


def live_tree(node: Any, name: str = "") -> Tree:
    """Returns a tree of JAX as Orbax writes it: named tuples as maps of their fields, other sequences as lists."""
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if hasattr(node, "_fields"):
        node = node._asdict()
    if isinstance(node, Mapping):
        return {str(key): live_tree(part, f"{name}/{key}") for key, part in node.items()}
    if isinstance(node, (list, tuple)):
        return [live_tree(part, f"{name}/{i}") for i, part in enumerate(node)]
    if hasattr(node, "shape") and hasattr(node, "dtype"):
        is_key = jax.numpy.issubdtype(node.dtype, jax.dtypes.prng_key)
        return LiveArray(jax.random.key_data(node[...]) if is_key else node, name)
    fields = {
        str(getattr(key, "name", getattr(key, "key", key))): part
        for (key, *_), part in jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    }
    return live_tree(fields, name)


def live_checkpoint(params: Any, opt_state: Any) -> Checkpoint:
    """Returns what is live in the form in which a checkpoint of Orbax is read."""
    tree = {"params": variables_of(params), "opt_state": variables_of(opt_state)}
    return Checkpoint("orbax", LIVE, live_tree(tree))


def live_state(params: Any, opt_state: Any) -> TrainState:
    """Returns the canonical state of what is live.

    Args:
        params: The parameters.
        opt_state: The state of any Optax transformation that the layouts know, or of `statekit.jax`'s.

    Raises:
        StateError: The state breaks its layout's rules; or no layout knows the optimizer.
    """
    checkpoint = live_checkpoint(params, opt_state)
    layout, _ = registry.detect_layout(checkpoint)
    return registry.decoded(layout, checkpoint, NO_HINTS)
