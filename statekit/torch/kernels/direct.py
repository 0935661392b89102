"""The update of a group that kernels move as a whole: nothing is done for each tensor but to ask where it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from statekit.arrays.torch_backend import TorchBackend
from statekit.errors import UsageError
from statekit.torch.groups import ParamGroup
from statekit.torch.kernels.grouped import DeviceScene, GroupedMove, Launches
from statekit.torch.slots import Slots
from statekit.torch.update_plan import GroupPlan

_XP = TorchBackend()
_GRAD, _SHAPE, _DTYPE = attrgetter("grad"), attrgetter("shape"), attrgetter("dtype")
_ADDRESS = torch.Tensor.data_ptr


@dataclass
class DirectBatch:
    """Tensors that one set of launches moves.

    Attributes:
        launches: Those.
        params: The parameters.
        slots: Slot -> tensors, as the launches take them. Who replaces one is noticed by `WatchedSlots`.
    """

    launches: Launches
    params: Sequence[torch.Tensor]
    slots: Mapping[str, Sequence[torch.Tensor]]

    def __post_init__(self) -> None:
        self.shapes = list(map(_SHAPE, self.params))
        self.dtypes = {(param.dtype, param.device) for param in self.params}
        self.grad_dtype = self.params[0].grad.dtype if self.params[0].grad is not None else None
        self.param_addresses: list[int] = []
        self.grad_addresses: list[int] = []
        self.slot_addresses = self._first_slots()

    def ready(self) -> bool:
        """Tells whether all tensors are as they were, but for where they lie, which the launches then know."""
        grads = list(map(_GRAD, self.params))
        try:
            grad_addresses = list(map(_ADDRESS, grads))
        except (TypeError, RuntimeError):  # a gradient is None, or sparse
            return False
        param_addresses = list(map(_ADDRESS, self.params))
        stays = param_addresses == self.param_addresses
        if self._first_slots() != self.slot_addresses or not (stays or self._keeps_params()):
            return False
        # Memory that stays may hold a gradient by other strides.
        if not all(map(torch.Tensor.is_contiguous, grads)):
            return False
        if stays and grad_addresses == self.grad_addresses and grads[0].dtype == self.grad_dtype:
            return True
        # A gradient has its parameter's shape and device: torch takes no other.
        fits = set(map(_DTYPE, grads)) == {self.grad_dtype}
        if fits:
            addresses = {"param": param_addresses, "grad": grad_addresses}
            self.launches.place({"param": self.params, "grad": grads, **self.slots}, addresses)
            self.param_addresses, self.grad_addresses = param_addresses, grad_addresses
        return fits

    def _keeps_params(self) -> bool:
        """Tells whether parameters in other memory are otherwise as they were."""
        return (
            list(map(_SHAPE, self.params)) == self.shapes
            and all(map(torch.Tensor.is_contiguous, self.params))
            and {(param.dtype, param.device) for param in self.params} == self.dtypes
        )

    def _first_slots(self) -> list[int]:
        """Returns where the first parameter's slots lie: who moves the memory of slots moves that of all."""
        return [tensors[0].data_ptr() for tensors in self.slots.values()]


class DirectUpdate:
    """The update of a group by kernels alone.

    Attributes:
        counted: Updates that only the device has counted: those of replayed graphs, and those that a gradient scaler
            may have skipped.
        counts: Whether it counts.
    """

    def __init__(self, plan: GroupPlan, batches: Sequence[DirectBatch]) -> None:
        self.plan, self.batches = plan, batches
        # Made here: a graph that made it would begin at 0 with every replay.
        self.counted = torch.zeros((), dtype=torch.int64, device=batches[0].params[0].device)
        self.counts = False
        self.captured: list[Any] = []

    @classmethod
    def of(
        cls, group: ParamGroup, plan: GroupPlan, state: Mapping[torch.Tensor, Slots]
    ) -> DirectUpdate | None:
        """Returns the update of a group; None where anything has to be done for single tensors."""
        hyper = plan.group.hyperparameters
        whole = not plan.sharded and not plan.faults and not group.get("behind") and group["step"] > 0
        if not whole or plan.acts_on_all or hyper.get("use_ema"):
            return None
        params = dict(zip(plan.group.paths, group["params"], strict=True))
        batches = []
        for batch in plan.batches:
            if not isinstance(batch.fast, GroupedMove):
                return None
            chosen = [params[path] for path in batch.paths]
            update = _direct_batch(batch.fast, group, chosen, [state[param] for param in chosen])
            if update is None:
                return None
            batches.append(update)
        return cls(plan, batches) if batches else None

    def ready(self, group: ParamGroup) -> bool:
        """Tells whether the group is as it was."""
        same = not group.get("behind") and self.plan.is_same_rule(group)
        return same and all(batch.ready() for batch in self.batches)

    def run(self, group: ParamGroup, scale: torch.Tensor | None, found: torch.Tensor | None) -> None:
        """Moves the group and counts the update.

        Args:
            group: The group, which is `ready`.
            scale: What a gradient scaler has multiplied gradients with.
            found: Whether it has found one that isn't finite.
        """
        captures = is_capturing(group)
        self.counts = self.counts or captures or found is not None
        counted = self.counted if self.counts else None
        scene = DeviceScene(
            _XP, group["variant"], group["lr"], group["step"], None, None, counted, scale, found
        )
        for batch in self.batches:
            launches = batch.launches
            if captures:
                launches = launches.for_graph()
                self.captured.append(launches)
            launches.launch(scene, None)
        if counted is None:
            group["step"] += 1
        elif found is None:
            counted.add_(1)
        else:
            counted.add_((found == 0).to(torch.int64).view(()))

    def settle(self, group: ParamGroup) -> None:
        """Has the group count what the device has counted; waits for it."""
        if self.counts:
            group["step"] += int(self.counted)
            self.counted.zero_()


def _direct_batch(
    move: GroupedMove, group: ParamGroup, params: Sequence[torch.Tensor], slots: Sequence[Slots]
) -> DirectBatch | None:
    grads = [param.grad for param in params if param.grad is not None]
    if len(grads) < len(params) or not all(grad.is_contiguous() for grad in grads):
        return None
    kinds = {
        (grad.dtype, *((name, slot.dtype) for name, slot in arrays.items()))
        for grad, arrays in zip(grads, slots, strict=True)
    }
    if len(kinds) > 1:
        return None
    named = {name: [arrays[name] for arrays in slots] for name in slots[0]}
    scene = DeviceScene(_XP, group["variant"], group["lr"], group["step"])
    launches = move.launched(scene, {"param": params, "grad": grads, **named}, None)
    return DirectBatch(launches, params, named)


def is_capturing(group: ParamGroup) -> bool:
    """Tells whether a CUDA graph is being captured where a group's parameters live."""
    return any(param.is_cuda for param in group["params"][:1]) and torch.cuda.is_current_stream_capturing()


def refuse_capture(groups: Sequence[ParamGroup]) -> None:
    """Refuses to be captured where kernels don't move all, or nothing was moved yet.

    Raises:
        UsageError: A CUDA graph is being captured.
    """
    if any(map(is_capturing, groups)):
        raise UsageError(
            "A CUDA graph can't hold this update.",
            expected="groups that kernels move as a whole, each of which has made an update before",
            remedy="make one update before the capture; leave options out that act on all gradients together",
        )
