"""Tensors that processes hold in parts: DTensor, as FSDP2 makes them, and the flat slices of FSDP1."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from statekit.errors import UsageError
from statekit.tensors.tensor import Index, Shape

_FSDP = "torch.distributed.fsdp"
FLAT_PREFIX = "_fsdp_wrapped_module."
"""What FSDP1 puts into the names of parameters; no checkpoint has it."""


@dataclass(frozen=True)
class FlatPart:
    """What this process has of a parameter that FSDP1 keeps flat: elements that follow each other, row by row.

    Attributes:
        shape: Shape of the whole parameter.
        start: Number of the first element that is here.
        count: How many are here.
    """

    shape: Shape
    start: int
    count: int

    def blocks(self) -> tuple[Index, ...]:
        """Returns what is here as blocks of the whole."""
        return tuple(_blocks(self.shape, self.start, self.start + self.count))


def _blocks(shape: Shape, start: int, stop: int) -> Iterator[Index]:
    """Yields the blocks of an array that its elements from `start` to `stop` are, in row-major order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # all within one row
        for rest in _blocks(shape[1:], start % row, start % row + stop - start):
            yield (slice(last, last + 1), *rest)
        return
    for rest in _blocks(shape[1:], start % row, row) if start % row else ():
        yield (slice(first - 1, first), *rest)
    if first < last:
        yield (slice(first, last), *(slice(0, n) for n in shape[1:]))
    for rest in _blocks(shape[1:], 0, stop % row):
        yield (slice(last, last + 1), *rest)


def flat_parts(model: torch.nn.Module) -> dict[int, FlatPart]:
    """Returns what this process has of each parameter that FSDP1 has flattened, by the parameter's `id`.

    Source: pytorch, torch/distributed/fsdp/_flat_param.py, `FlatParameter`, `_ShardParamInfo`.

    Raises:
        UsageError: Parameters were flattened without `use_orig_params=True`, so that none of their own is there.
    """
    if _FSDP not in sys.modules:
        return {}
    from torch.distributed.fsdp import FullyShardedDataParallel

    parts: dict[int, FlatPart] = {}
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        flat = handle.flat_param
        if not handle._use_orig_params:
            raise UsageError(
                "FSDP has made one flat parameter of several.",
                place=", ".join(info.param_name for info in flat._param_infos),
                expected="FullyShardedDataParallel(..., use_orig_params=True)",
                remedy="wrap the model so, or attest a run on one process",
            )
        rows = zip(flat._params or (), flat._shard_param_infos, flat._shapes, strict=True)
        for param, info, shape in rows:
            count = (info.numel_in_shard or 0) if info.in_shard else 0
            parts[id(param)] = FlatPart(tuple(shape), info.intra_param_start_idx or 0, count)
    return parts


def is_sharded(value: Any) -> bool:
    """Tells whether a tensor is a DTensor; asks for nothing that isn't imported."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")


def own_part(value: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Returns the part of a tensor that this process holds, and where it begins in the whole."""
    if not is_sharded(value):
        return value, (0,) * value.dim()
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(value, DTensor)
    _, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return value.to_local(), tuple(int(i) for i in start)


def write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a value into a tensor, which stays spread over processes as it is."""
    if is_sharded(target) and is_sharded(value):
        own_part(target)[0].copy_(laid_out_like(value, target))
    else:
        target.copy_(value)


def readable(value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with which every process can reckon: whole where some would hold an empty part of it.

    Maxima and the like have no value over nothing. Such tensors are short: shorter than there are processes, nearly.
    """
    if not is_sharded(value):
        return value
    from torch.distributed.tensor import DTensor, Replicate, Shard

    assert isinstance(value, DTensor)
    mesh, placements = value.device_mesh, value.placements
    parts = [
        (int(value.shape[placement.dim]), mesh.size(i))
        for i, placement in enumerate(placements)
        if isinstance(placement, Shard)
    ]
    if all(-(-length // count) * (count - 1) < length for length, count in parts):
        return value
    return value.redistribute(mesh, [Replicate()] * mesh.ndim)


def laid_out_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's values, spread over processes as another's if that is one, else whole."""
    from torch.distributed.tensor import DTensor

    assert isinstance(value, DTensor)
    if isinstance(like, DTensor):
        return value.redistribute(like.device_mesh, like.placements).to_local()
    return value.full_tensor()
