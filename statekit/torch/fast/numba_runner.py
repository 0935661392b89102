"""Updates of many equal tensors on a CPU by compiled loops, where Numba is installed.

What eager operations read and write anew for each product and sum, a loop does in few passes over one tensor, which is
taken where it lies; tensors are shared out among as many threads as torch has.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch

from statekit.errors import StateError
from statekit.tensors.tensor import Array, Shape

Tensors: TypeAlias = Sequence[torch.Tensor]

_ALONE = 2**16
"""Elements that a thread passes in the time it takes to wake another."""
_PIECE = 2**18
"""The most elements of a tensor in one piece, where threads may share it."""


def in_reach(items: Sequence[Tensors], pieces: int = 1) -> bool:
    """Tells whether loops are worth while, and all tensors as they take them: dense float32 of one size on a CPU.

    Loops go by addresses: memory of another kind would be misread. They need Numba, and a tensor for each thread, or
    one of the pieces that tensors are cut into.
    """
    some, size = len(items[0]), items[0][0].numel()
    worth = (size <= _ALONE or some * pieces >= torch.get_num_threads()) and _numba_is_there()
    return worth and all(
        tensor.is_cpu and tensor.dtype is torch.float32 and tensor.numel() == size and tensor.is_contiguous()
        for tensors in items
        for tensor in tensors
    )


@cache
def _numba_is_there() -> bool:
    return find_spec("numba") is not None


def pieces_of(tensors: Tensors) -> int:
    """Returns the number of equal pieces that each of some equal tensors is cut into, where threads may share it.

    It depends on their size alone: so do the sums that are made of the pieces'.
    """
    size = tensors[0].numel()
    least = -(-size // _PIECE)
    return next((pieces for pieces in range(least, 2 * least) if size % pieces == 0), 1)


@dataclass(frozen=True)
class Items:
    """Equal parameters with their gradients and slots, as loops take them: by addresses.

    Attributes:
        params: The parameters.
        shape: Of an item: that of a matrix, or a vector's length. In each tensor one or more lie one after the other.
        where: Where the items of parameters begin, those of gradients, and those of each slot; int64.
    """

    params: Tensors
    shape: Shape
    where: Sequence[Array]

    @classmethod
    def of(cls, tensors: Sequence[Tensors], shape: Shape) -> Items:
        """Takes tensors `in_reach`: parameters first, as many of each kind."""
        return cls(tensors[0], shape, [_addresses(some, shape) for some in tensors])

    def run(self, loop: Callable[..., None], *others: torch.Tensor | float) -> None:
        """Runs a loop of `statekit.torch.fast.numba_kernels` over all items, on as many threads as torch has.

        Args:
            loop: It.
            others: What it gets beside: tensors with a row for each item, numbers, which become float32, and switches.

        Raises:
            StateError: A tensor has more rows, or fewer.
        """
        given, count = [_given(other) for other in others], len(self.where[0])
        if wrong := [other.shape for other in given if isinstance(other, np.ndarray) and len(other) != count]:
            raise StateError(
                "Slots don't fit their parameters.",
                place=f"parameters of shape {tuple(self.params[0].shape)}",
                expected=f"{count} rows",
                found=", ".join(map(str, wrong)),
                remedy="load the optimizer's state for these parameters anew",
            )
        threads = max(1, min(torch.get_num_threads(), count, count * math.prod(self.shape) // _ALONE))
        first, *rest = pairwise(count * i // threads for i in range(threads + 1))
        waited = [_threads(os.getpid()).submit(loop, *part, self.shape, *self.where, *given) for part in rest]
        loop(*first, self.shape, *self.where, *given)
        for future in waited:
            future.result()
        torch.autograd.graph.increment_version(self.params)  # as an operation would: autograd asks for it


def _given(other: torch.Tensor | float | bool) -> Any:
    if isinstance(other, torch.Tensor):
        return other.numpy()
    return other if isinstance(other, bool) else np.float32(other)


def _addresses(tensors: Tensors, shape: Shape) -> Array:
    """Returns where each item begins, int64."""
    size = math.prod(shape)
    inside = np.arange(tensors[0].numel() // size, dtype=np.int64) * (4 * size)
    starts = np.fromiter((tensor.data_ptr() for tensor in tensors), np.int64, len(tensors))
    return (starts[:, None] + inside).reshape(-1)


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Returns the threads of this very process: a fork has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), "statekit")
