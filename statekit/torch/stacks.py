"""Parameters of one shape, moved many at a time: small ones in stacks that fit a cache, large ones as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

Slots: TypeAlias = Mapping[str, torch.Tensor]
Kernel: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Slots, torch.Tensor], None]
"""Moves parameters and slots in place: (params, grads, slots, room), with an axis for the parameters in front.

All are contiguous. Gradients are read only; room has the shape of the parameters and holds anything.
"""

HOT = {"cpu": 2**18}
"""The most elements in a stack or a block: on a CPU, what its caches hold a few times."""
HOT_ELSEWHERE = 2**22


def plain(param: torch.Tensor) -> bool:
    """Tells whether fast paths are made for a parameter: dense float32, not empty, and no subclass's."""
    return (
        type(param) in (torch.Tensor, torch.nn.Parameter)
        and param.layout == torch.strided
        and param.dtype == torch.float32
        and param.numel() > 0
    )


def in_stacks(
    kernel: Kernel,
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    slots: Sequence[Slots],
) -> None:
    """Runs a kernel over parameters of one shape, and copies back what it moved in a stack."""
    most = min(len(params), max(1, _hot(params[0]) // params[0].numel()))
    # Memory is taken once for all stacks: fresh pages cost more than what is done with them.
    room = params[0].new_empty((most, *params[0].shape))
    fields = [
        _Stacks(ts, most) for ts in (grads, params, *([own[name] for own in slots] for name in slots[0]))
    ]
    for start in range(0, len(params), most):
        g, p, *moved = (field.read(start) for field in fields)
        kernel(p, g, dict(zip(slots[0], moved, strict=True)), room[: len(p)])
        for field in fields[1:]:
            field.write(start)


class _Stacks:
    """Stacks of some tensors, one after the other in the same memory; a tensor that fills a stack is its own."""

    def __init__(self, tensors: Sequence[torch.Tensor], most: int) -> None:
        self._tensors, self._most = tensors, most
        whole = most == 1 and all(tensor.is_contiguous() for tensor in tensors)
        self._memory = None if whole else tensors[0].new_empty((most, *tensors[0].shape))

    def read(self, start: int) -> torch.Tensor:
        if self._memory is None:
            return self._tensors[start].unsqueeze(0)
        part = list(self._tensors[start : start + self._most])
        stack = self._memory[: len(part)]
        torch.stack(part, out=stack)
        return stack

    def write(self, start: int) -> None:
        if self._memory is not None:
            part = list(self._tensors[start : start + self._most])
            torch._foreach_copy_(part, self._memory[: len(part)].unbind())


def blocks(stack: torch.Tensor) -> list[slice]:
    """Returns the parts of a stack's second axis that are best handled one after the other."""
    height = stack.shape[1]
    most = max(1, _hot(stack) * height // stack.numel())
    return [slice(start, start + most) for start in range(0, height, most)]


def _hot(tensor: torch.Tensor) -> int:
    return HOT.get(tensor.device.type, HOT_ELSEWHERE)


def squares(value: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squares of each entry of a stack."""
    flat = value.flatten(1)
    if len(flat) == 1:
        return torch.dot(flat[0], flat[0]).reshape(1)
    return torch.linalg.vector_norm(flat, dim=1).square()


def along(values: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
    """Returns a value for each entry of a stack, or one for all, in a shape that meets the stack."""
    shape = (-1, *(1,) * (stack.dim() - 1))
    return values.view(shape)
