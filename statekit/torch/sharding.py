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


def laid_out_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's values, spread over processes as another's if that is one, else whole."""
    from torch.distributed.tensor import DTensor

    assert isinstance(value, DTensor)
    if isinstance(like, DTensor):
        return value.redistribute(like.device_mesh, like.placements).to_local()
    return value.full_tensor()
