"""Updates of many equal tensors on a CPU by compiled loops, where Numba is installed.

What eager operations read and write anew for each product and sum, a loop does in few passes over one tensor, which is
taken where it lies; tensors are shared out among as many threads as torch has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from statekit.errors import StateError
from statekit.tensors.tensor import Array, Shape

_ALONE = 2**16
"""Elements that a thread passes in the time it takes to wake another."""


def in_reach(items: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Tells whether loops are worth while, and all tensors as they take them: dense float32 of one size on a CPU.

    Loops go by addresses: memory of another kind would be misread. They need Numba, and a tensor for each thread.
    """
    some, size = len(items[0]), items[0][0].numel()
    worth = (size <= _ALONE or some >= torch.get_num_threads()) and _numba_is_there()
    return worth and all(
        tensor.is_cpu and tensor.dtype is torch.float32 and tensor.numel() == size and tensor.is_contiguous()
        for tensors in items
        for tensor in tensors
    )


@cache
def _numba_is_there() -> bool:
    return find_spec("numba") is not None


def run(
    loop: Callable[..., None],
    shape: Shape,
    items: Sequence[Sequence[torch.Tensor]],
    *others: torch.Tensor | float,
) -> None:
    """Runs a loop of `statekit.torch.fast.numba_kernels`.

    Args:
        loop: It.
        shape: Of an item: that of a matrix, or a vector's length.
        items: What the loop moves and reads, parameters first: equal numbers of tensors `in_reach`, in each of which
            one or more items lie one after the other.
        others: What it gets beside: tensors with a row for each item, numbers, which become float32, and switches.

    Raises:
        StateError: A tensor has more rows, or fewer.
    """
    where = [_addresses(tensors, shape) for tensors in items]
    given, count = [_given(other) for other in others], len(where[0])
    if wrong := [other.shape for other in given if isinstance(other, np.ndarray) and len(other) != count]:
        raise StateError(
            "Slots don't fit their parameters.",
            place=f"parameters of shape {tuple(items[0][0].shape)}",
            expected=f"{count} rows",
            found=", ".join(map(str, wrong)),
            remedy="load the optimizer's state for these parameters anew",
        )
    threads = max(1, min(torch.get_num_threads(), count, count * int(np.prod(shape)) // _ALONE))
    first, *rest = pairwise(count * i // threads for i in range(threads + 1))
    waited = [_threads(os.getpid()).submit(loop, *part, shape, *where, *given) for part in rest]
    loop(*first, shape, *where, *given)
    for each in waited:
        each.result()
    torch.autograd.graph.increment_version(items[0])  # as an operation would: autograd asks for it


def _given(other: torch.Tensor | float | bool) -> Any:
    if isinstance(other, torch.Tensor):
        return other.numpy()
    return other if isinstance(other, bool) else np.float32(other)


def _addresses(tensors: Sequence[torch.Tensor], shape: Shape) -> Array:
    """Returns where each item begins, int64."""
    size = int(np.prod(shape))
    inside = np.arange(tensors[0].numel() // size, dtype=np.int64) * (4 * size)
    starts = np.fromiter((tensor.data_ptr() for tensor in tensors), np.int64, len(tensors))
    return (starts[:, None] + inside).reshape(-1)


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Returns the threads of this very process: a fork has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), "statekit")
