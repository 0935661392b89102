"""One update of a group, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from statekit.arrays.backend import Value
from statekit.arrays.torch_backend import TorchBackend
from statekit.dropin.by_name import path_of
from statekit.optim.keras_averages import follow_average
from statekit.optim.run import behind_after, counts_apart, moves, steps_for
from statekit.optim.steps import Scene, Steps
from statekit.state.schema import load_schema
from statekit.torch.fast.dispatch import takes_any_gradient
from statekit.torch.groups import ParamGroup
from statekit.torch.sharding import readable, write
from statekit.torch.slots import Slots
from statekit.torch.update_plan import Batch, GroupPlan

_XP = TorchBackend()


def move(group: ParamGroup, plan: GroupPlan, state: Mapping[torch.Tensor, Slots]) -> None:
    """Moves a group's parameters and slots by their gradients, and counts the update.

    Args:
        group: The group; each parameter with a gradient can be stepped.
        plan: How it is moved.
        state: Slots by parameter, where it lives.
    """
    steps, settled_group = steps_for(group["schema"], group["variant"]), plan.group
    params = dict(zip(settled_group.paths, group["params"], strict=True))
    slots = {path: state[param] for path, param in params.items()}
    grads = {path: param.grad for path, param in params.items() if param.grad is not None}
    behind = _behind(group, settled_group.paths)
    if born := _born_of_params(group["schema"]):
        _follow(params, slots, born, [p for p in grads if not behind.get(p, group["step"])])
    scene = Scene(_XP, group["variant"], group["lr"], group["step"])
    arrays = Arrays(params, slots, grads)
    read = arrays.readable() if plan.reads_sharded else arrays
    moving_grads, group_slots, common = steps.prepare(
        scene, settled_group, read.params, read.grads, read.slots, group.get("slots", {})
    )
    read, arrays = replace(read, grads=moving_grads), replace(arrays, grads=moving_grads)
    for batch in plan.batches:
        by_text, by_fast = _split(batch, arrays)
        if by_text:
            _by_text(steps, scene, plan, by_text, read, arrays, common, behind)
        if batch.fast is not None:
            for count, paths in _by_count(by_fast, behind, group["step"]):
                batch.fast(replace(scene, step=count), *arrays.listed(paths), common)
    _follow_averages(arrays, plan, group["step"])
    if group_slots:
        group["slots"] = dict(group_slots)
    _count(group, [path for path in settled_group.paths if path not in grads], behind)


def _split(batch: Batch, arrays: Arrays) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the parameters of a batch that the reference text moves, and those that the fast path moves.

    A fast path leaves gradients of another dtype than their parameters' to the text, unless it takes any.
    """
    paths = [path for path in batch.paths if path in arrays.grads]
    if batch.fast is None:
        return paths, []
    if takes_any_gradient(batch.fast):
        return [], paths
    by_text = sorted(path for path in paths if arrays.grads[path].dtype is not arrays.params[path].dtype)
    return by_text, [path for path in paths if path not in by_text] if by_text else paths


def _by_text(
    steps: Steps,
    scene: Scene,
    plan: GroupPlan,
    paths: Sequence[str],
    read: Arrays,
    arrays: Arrays,
    common: Value,
    behind: Mapping[str, int],
) -> None:
    grads = {path: read.grads[path] for path in paths}
    batching = _XP if len(paths) > 1 else None
    for path, param, moved in moves(
        steps, scene, plan.configs, read.params, grads, read.slots, common, counts=behind, batching=batching
    ):
        write(arrays.params[path], param)
        for name, value in moved.items():
            write(arrays.slots[path][name], value)


@dataclass(frozen=True)
class Arrays:
    """The parameters, slots and gradients of an update, by path."""

    params: Mapping[str, torch.Tensor]
    slots: Mapping[str, Slots]
    grads: Mapping[str, torch.Tensor]

    def readable(self) -> Arrays:
        """Returns the same with each tensor readable, where processes hold parts of them."""
        return Arrays(
            {path: readable(param) for path, param in self.params.items()},
            {path: {n: readable(value) for n, value in slots.items()} for path, slots in self.slots.items()},
            {path: readable(grad) for path, grad in self.grads.items()},
        )

    def listed(self, paths: Sequence[str]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Slots]]:
        """Returns parameters, gradients and slots of some paths."""
        return [self.params[p] for p in paths], [self.grads[p] for p in paths], [self.slots[p] for p in paths]


def _follow_averages(arrays: Arrays, plan: GroupPlan, step: int) -> None:
    for path, slots in arrays.slots.items():
        if "average" in slots:
            param, after = follow_average(_XP, arrays.params[path], slots, plan.group, step)
            write(arrays.params[path], param)
            write(slots["average"], after["average"])


def _behind(group: ParamGroup, paths: Sequence[str]) -> dict[str, int]:
    behind: Mapping[str, int] = group.get("behind", {})
    if not behind:
        return {}
    return {p: behind[n] for p, n in zip(paths, group["param_names"], strict=True) if n in behind}


def _count(group: ParamGroup, missed: Sequence[str], behind: Mapping[str, int]) -> None:
    if not counts_apart(group["schema"], group["variant"]):
        missed = []
    if missed or behind:
        counts = behind_after(behind, missed, group["step"])
        names = zip(group["param_names"], map(path_of, group["param_names"]), strict=True)
        group["behind"] = {name: counts[path] for name, path in names if path in counts}
    group["step"] += 1


def _by_count(
    paths: Sequence[str], behind: Mapping[str, int], step: int
) -> Iterator[tuple[int, Sequence[str]]]:
    if not behind:
        yield from [(step, paths)] if paths else []
        return
    for count in sorted({behind.get(path, step) for path in paths}):
        yield count, [path for path in paths if behind.get(path, step) == count]


@cache
def _born_of_params(schema: str) -> tuple[str, ...]:
    """Returns the slots that begin as the parameter itself."""
    return tuple(name for name, slot in load_schema(schema).slots.items() if slot.init == "p")


def _follow(
    params: Mapping[str, torch.Tensor], slots: Mapping[str, Slots], born: Sequence[str], first: Sequence[str]
) -> None:
    """Before a parameter's first update, lets what began as the parameter be what it has become since.

    Weights may be loaded into a model after its optimizer was made; what still rounds to them keeps its digits.
    """
    for path in first:
        for slot in (slots[path][name] for name in born if name in slots[path]):
            slot.copy_(
                torch.where(slot.to(params[path].dtype) == params[path], slot, params[path].to(slot.dtype))
            )
