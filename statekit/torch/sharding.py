"""Tensors that processes hold in parts (DTensor, as FSDP2 makes them)."""

from __future__ import annotations

from typing import Any

import torch


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
