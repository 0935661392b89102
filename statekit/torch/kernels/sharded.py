"""DTensors, as FSDP2 makes them: each process moves its part by the kernels, by the rule of the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from statekit.arrays.backend import Value
from statekit.optim.adafactor import ParamConfig
from statekit.optim.steps import Scene
from statekit.state.train_state import Axis
from statekit.torch.fast.adafactor import item_of
from statekit.torch.fast.batching import Slots, Tensors
from statekit.torch.kernels.grouped import GroupedMove, grouped_move
from statekit.torch.kernels.joining import Split
from statekit.torch.sharding import is_sharded, laid_out_like, own_part


@dataclass(frozen=True)
class ShardedMove:
    """The update of DTensors that lie alike.

    Attributes:
        move: That of the parts that are here.
    """

    move: GroupedMove

    def __call__(
        self, scene: Scene, params: Tensors, grads: Tensors, slots: Slots, common: Value | None
    ) -> None:
        parts = [laid_out_like(grad, param) for grad, param in zip(grads, params, strict=True)]
        here = [{name: _local(slot) for name, slot in arrays.items()} for arrays in slots]
        whole = common.full_tensor() if is_sharded(common) and common is not None else common
        self.move(scene, list(map(_local, params)), parts, here, whole)


def sharded_move(
    schema: str, variant: str, config: Any, param: torch.Tensor, slots: Mapping[str, torch.Tensor]
) -> ShardedMove | None:
    """Returns the update of a DTensor by kernels; None where its parts or its slots don't lie as they have it.

    Args:
        schema: The optimizer.
        variant: Whose rule.
        config: What its `settle` returned.
        param: The parameter: one dimension of its mesh cuts it, at most, and along one axis.
        slots: Its slots: those of its shape lie as it does, the others are whole everywhere.
    """
    cuts = _cuts(param)
    local = _local(param).detach()
    if len(cuts) > 1 or not all(_lies_as_expected(slot, param) for slot in slots.values()):
        return None
    split = None
    if cuts:
        ((dimension, axis),) = cuts.items()
        group = param.device_mesh.get_group(dimension)  # type: ignore[attr-defined]  # a DTensor's
        if (split := _split(config, param, axis, group)) is None:
            return None
    move = grouped_move(schema, variant, config, local, split)
    return None if move is None else ShardedMove(move)


def _cuts(param: Any) -> dict[int, int]:
    """Returns the dimensions of the mesh that cut a tensor, and along which axis; -1 stands for another way."""
    from torch.distributed.tensor import Replicate, Shard

    return {
        i: placement.dim if type(placement) is Shard else -1
        for i, placement in enumerate(param.placements)
        if type(placement) is not Replicate and param.device_mesh.size(i) > 1
    }


def _split(config: Any, param: torch.Tensor, axis: int, group: Any) -> Split | None:
    """Returns how processes share a tensor; None if a part isn't some rows, or some columns."""
    labels = config.rule.axes if isinstance(config, ParamConfig) else ()
    if axis < 0 or param.numel() == 0 or Axis.BATCH in labels:
        return None
    item = item_of(config.rule, tuple(param.shape)) if labels else None
    if item is None or not item[1]:
        return Split((param.numel(),), (0,), group)
    if axis > 0 and labels[axis] is labels[axis - 1]:
        return None
    whole, side = item[0], 1 if axis > 0 else 0
    begin = own_part(param)[1][axis] * whole[side] // param.shape[axis]
    return Split(whole, (0, begin) if side else (begin, 0), group)


def _lies_as_expected(slot: torch.Tensor, param: torch.Tensor) -> bool:
    if not is_sharded(slot):
        return False
    if slot.shape == param.shape:
        return bool(slot.placements == param.placements)  # type: ignore[attr-defined]  # of DTensors
    return _local(slot).shape == slot.shape


def _local(value: Any) -> torch.Tensor:
    local: torch.Tensor = value.to_local()
    return local
