"""Parameters of one shape, moved many at a time: small ones in stacks that fit a cache, large ones as they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch

from statekit.state.constants import variant_constants
from statekit.state.schema import load_schema

Tensors: TypeAlias = Sequence[torch.Tensor]
Slots: TypeAlias = Sequence[Mapping[str, torch.Tensor]]
Stacks: TypeAlias = Mapping[str, torch.Tensor]
Kernel: TypeAlias = Callable[[slice, Stacks, Tensors], None]
"""Moves a part of the parameters: (which, stacks, rooms).

Stacks are contiguous, with an axis for the parameters in front, and written in place; rooms have the shape of the
parameters' stack and hold anything.
"""

STACK = {"cpu": 2**19}
"""The most elements in a stack: on a CPU, what its caches hold a few times."""
STACK_ELSEWHERE = 2**22


def plain(param: torch.Tensor) -> bool:
    """Tells whether fast paths are made for a parameter: dense float32, not empty, and no subclass's."""
    return (
        type(param) in (torch.Tensor, torch.nn.Parameter)
        and param.layout == torch.strided
        and param.dtype == torch.float32
        and param.is_contiguous()
        and param.numel() > 0
    )


def in_stacks(
    kernel: Kernel, moved: Mapping[str, Tensors], read: Mapping[str, Tensors], rooms: int = 1
) -> None:
    """Runs a kernel over tensors of parameters that have one shape, as many at a time as a stack holds.

    Args:
        kernel: What moves them.
        moved: What it moves, by name: the parameters as `param`, and slots. Copied back from stacks.
        read: What it reads beside, by name.
        rooms: How many rooms it needs.
    """
    like = moved["param"]
    most = min(len(like), max(1, _largest(like[0]) // like[0].numel()))
    # Memory is taken once for all stacks: fresh pages cost more than what is done with them.
    room = like[0].new_empty((rooms, most, *like[0].shape))
    fields = {name: Stacked(tensors, most) for name, tensors in {**moved, **read}.items()}
    for start in range(0, len(like), most):
        part = slice(start, min(start + most, len(like)))
        stacks = {name: field.read(part) for name, field in fields.items()}
        kernel(part, stacks, room[:, : part.stop - start].unbind())
        for name in moved:
            fields[name].write(part)


class Stacked:
    """Stacks of some tensors, one after the other in the same memory; tensors that lie so already are their own."""

    def __init__(self, tensors: Tensors, most: int) -> None:
        self._tensors, self._most = tensors, most
        self._memory: torch.Tensor | None = None
        self._copied = False

    def read(self, part: slice = slice(None)) -> torch.Tensor:
        """Returns a stack of some tensors."""
        tensors = self._tensors[part]
        first = tensors[0]
        self._copied = not _adjacent(tensors)
        if not self._copied:
            return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
        if self._memory is None:
            self._memory = first.new_empty((self._most, *first.shape))
        stack = self._memory[: len(tensors)]
        torch.stack(list(tensors), out=stack)
        return stack

    def write(self, part: slice = slice(None)) -> None:
        """Writes the stack that was read last back into them."""
        if self._copied and self._memory is not None:
            tensors = list(self._tensors[part])
            torch._foreach_copy_(tensors, self._memory[: len(tensors)].unbind())


def _adjacent(tensors: Tensors) -> bool:
    """Tells whether equal tensors lie one after the other in one memory."""
    first = tensors[0]
    start, size = first.data_ptr(), first.numel() * first.itemsize
    storage = first.untyped_storage()
    return (
        start + len(tensors) * size <= storage.data_ptr() + storage.nbytes()
        and all(tensor.data_ptr() == start + i * size for i, tensor in enumerate(tensors))
        and all(tensor.is_contiguous() for tensor in tensors)
    )


def laid_together(slots: Slots) -> list[dict[str, torch.Tensor]]:
    """Returns parameters' slots, of which small equal ones share a memory in which they lie as stacks want them."""
    together = [dict(arrays) for arrays in slots]
    places: dict[tuple[str, Hashable], list[int]] = {}
    for i, arrays in enumerate(slots):
        for name, slot in arrays.items():
            if type(slot) is torch.Tensor and 0 < 2 * slot.numel() <= _largest(slot):
                places.setdefault((name, (slot.shape, slot.dtype, slot.device)), []).append(i)
    for (name, _), equal in places.items():
        if len(equal) > 1:
            rows = torch.stack([slots[i][name] for i in equal]).unbind()
            for i, row in zip(equal, rows, strict=True):
                together[i][name] = row
    return together


def in_own_memory(value: torch.Tensor) -> torch.Tensor:
    """Returns a slot as a tensor that shares no memory: a pickle of it holds no more than itself."""
    shares = type(value) is torch.Tensor and value.numel() * value.itemsize < value.untyped_storage().nbytes()
    return value.clone() if shares else value


def by_name(slots: Slots, names: Sequence[str]) -> dict[str, list[torch.Tensor]]:
    """Returns slots by name, each in the order of the parameters."""
    return {name: [arrays[name] for arrays in slots] for name in names}


def pieces(*stacks: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the same pieces of stacks of one shape, each flat behind the first axis and no larger than a stack."""
    flat = [stack.view(len(stack), -1) for stack in stacks]
    length = max(1, _largest(flat[0]) // len(flat[0]))
    # As an operator: the method of the same name is untyped Python.
    return zip(*(torch.ops.aten.split.Tensor(stack, length, 1) for stack in flat), strict=True)


def _largest(tensor: torch.Tensor) -> int:
    return STACK.get(tensor.device.type, STACK_ELSEWHERE)


def squares(stack: torch.Tensor) -> torch.Tensor:
    """Returns the sum of squares of each entry of a stack."""
    if len(stack) == 1:
        return products(stack, stack)
    norms: torch.Tensor = torch.linalg.vector_norm(stack.view(len(stack), -1), dim=1)
    return norms.square_()


def products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns the sum of products of two stacks, for each entry."""
    if len(left) == 1:
        return torch.dot(left.view(-1), right.view(-1)).view(1)
    sums: torch.Tensor = torch.linalg.vecdot(left.view(len(left), -1), right.view(len(right), -1))
    return sums


def along(values: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
    """Returns a value for each entry of a stack, or one for all, in a shape that meets the stack."""
    return values.view((-1, *(1,) * (stack.dim() - 1)))


Values: TypeAlias = tuple[Any, ...] | None
"""Those that are followed; None: all that there may be."""
_UP_TO_ROUNDING = ("none", "rounding")
"""Effects of a difference that a path may leave out of account: it is held to the text up to rounding."""


@dataclass(frozen=True)
class Followed:
    """What a fast path follows.

    Attributes:
        hyper: Hyperparameter -> values. One that isn't here must be as in a variant that doesn't have it, by
            `if_absent` of the schema.
        forms: Constant of the variant -> forms. One that isn't here may make no difference but in rounding, by `effect`
            of the schema.
        slots: Slots that it moves, or that only exist with hyperparameters which it leaves to the text. A variant whose
            parameters may have others is the text's.
    """

    hyper: Mapping[str, Values]
    forms: Mapping[str, Values]
    slots: tuple[str, ...]

    def fits(self, schema: str, variant: str, hyper: Any) -> bool:
        """Tells whether the path follows a variant's rule with hyperparameters as the optimizer's `settle` has them."""
        rules, constants = load_schema(schema), variant_constants(schema, variant)
        hyperparameters, differences = rules.hyperparameters, rules.data["differences"]
        return (
            {*rules.kept(variant)} <= {*self.slots}
            and all(
                _among(getattr(hyper, field.name), self.hyper[field.name])
                if field.name in self.hyper
                else _is_absent(hyperparameters.get(field.name, {}), getattr(hyper, field.name))
                for field in fields(hyper)
            )
            and all(
                _among(form, self.forms[name])
                if name in self.forms
                else differences.get(name, {}).get("effect") in _UP_TO_ROUNDING
                for name, form in constants.items()
            )
        )


def _among(value: Any, values: Values) -> bool:
    return values is None or value in values


def _is_absent(spec: Mapping[str, Any], value: Any) -> bool:
    return "if_absent" in spec and bool(value == spec["if_absent"])
