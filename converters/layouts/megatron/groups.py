"""Parameter groups as Megatron-Core finds them again: by their multipliers, and by the rule that makes them.

A file doesn't say which parameters a group moves. By the standard rule those whose name ends with .bias and those of
one axis have no weight decay; layers of one kind may be stacked along a first axis, which doesn't count.
Source: NVIDIA/Megatron-LM megatron/core/optimizer/__init__.py, `get_standard_config_overrides`, `_get_param_groups`;
optimizer.py, `_filter_and_reorder_param_groups`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statekit.errors import Faults, InexactError, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.tensors.tensor import Shape

MULTIPLIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""What tells one group from another."""
_COUNT, _CORRECTS = "step", "bias_correction"
"""Options of FusedAdam's groups alone: its count, and whether it corrects the bias, without which it can't go on."""
_STACKED = re.compile(r"(^|\.)layers\.(?!\d)")
_RULE = (
    "The file doesn't say which parameters its groups move; by Megatron-Core's standard rule those named *.bias and "
    "those of one axis are the group without weight decay."
)
_ALL_DECAY = (
    "One group has biases or vectors with weight decay; Megatron-Core's standard rule gives them a group without, and "
    "finds this one only where the program makes its optimizer with config_overrides={}."
)


def with_params(
    groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Shape], checkpoint: Checkpoint
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns a file's groups with the names of their parameters and without their count, and what was assumed.

    Raises:
        StateError: Nothing tells which parameters the groups move.
    """
    groups = [{key: value for key, value in group.items() if key != _COUNT} for group in groups]
    params = params_of_groups(groups, shapes, checkpoint.path)
    named = [{**group, "params": names_of} for group, names_of in zip(groups, params, strict=True)]
    return named, (_RULE,) if len(groups) > 1 else ()


def params_of_groups(
    groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Shape], place: object
) -> list[list[str]]:
    """Returns the parameters of each group, in the model's order.

    Raises:
        StateError: Nothing tells which parameters the groups move.
    """
    if len(groups) == 1:
        return [list(shapes)]
    without = [_is_without_decay(group) for group in groups]
    if len(groups) != 2 or without[0] == without[1]:
        multipliers = [
            ", ".join(f"{k} {group[k]}" for k in MULTIPLIERS if k in group) or "no multipliers"
            for group in groups
        ]
        raise StateError(
            "Nothing tells which parameters the groups move.",
            place=place,
            expected="one group, or one with and one without weight decay",
            found="; ".join(multipliers),
        )
    return [
        [name for name, shape in shapes.items() if _has_no_decay(name, shape) == is_without]
        for is_without in without
    ]


def without_params(
    groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Shape], updates: int, counted: bool
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns groups as a file has them, and what was assumed.

    Those of Megatron-Core itself stay as they were. Others get what any of its Adams asks for: Apex' and Transformer
    Engine's FusedAdam count in `step`, and correct the bias if a group says so; torch's AdamW passes both over.

    Args:
        groups: Groups by name, with the options of torch's AdamW.
        shapes: Shapes of the parameters.
        updates: Updates done.
        counted: Whether groups have the count whatever the class of their optimizer.

    Raises:
        InexactError: Groups that the rule wouldn't make again; lists every fault.
    """
    written = [_complete(group, shapes, updates, counted) for group in _split(groups, shapes)]
    _check(written, shapes)
    with_decay = len(written) == 1 and not _is_without_decay(written[0])
    exceptions = [name for name in written[0]["params"] if _has_no_decay(name, shapes[name])]
    notes = (_ALL_DECAY,) if with_decay and exceptions else ()
    return [{k: v for k, v in group.items() if k != "params"} for group in written], notes


def _complete(
    group: Mapping[str, Any], shapes: Mapping[str, Shape], updates: int, counted: bool
) -> dict[str, Any]:
    """Returns a group with what it is found by and what its optimizer asks for."""
    is_foreign = MULTIPLIERS[0] not in group
    multipliers = {
        "wd_mult": float(not _all_without_decay(group, shapes)),
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
    }
    defaults = {"default_config": True, _CORRECTS: True} if is_foreign else {}
    completed = {**multipliers, **defaults, **group}
    return {**completed, **({_COUNT: updates} if counted or _CORRECTS in completed else {})}


def _split(groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Shape]) -> list[Mapping[str, Any]]:
    """Splits a single group without weight decay in two, as Megatron's rule does; other groups stay."""
    if len(groups) != 1 or groups[0].get("weight_decay") != 0 or MULTIPLIERS[0] in groups[0]:
        return list(groups)
    parts = [
        [name for name in groups[0]["params"] if _has_no_decay(name, shapes[name]) == is_decayed]
        for is_decayed in (False, True)
    ]
    return [{**groups[0], "params": part} for part in parts if part] or list(groups)


def _all_without_decay(group: Mapping[str, Any], shapes: Mapping[str, Shape]) -> bool:
    """Tells whether a group is the one that the rule makes without weight decay."""
    names = group["params"]
    return group.get("weight_decay") == 0 and bool(names) and all(_has_no_decay(n, shapes[n]) for n in names)


def _is_without_decay(group: Mapping[str, Any]) -> bool:
    return bool(group.get("wd_mult", group.get("weight_decay")) == 0)


def _has_no_decay(name: str, shape: Shape) -> bool:
    return name.endswith(".bias") or len(shape) - bool(_STACKED.search(name)) == 1


def _check(groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Shape]) -> None:
    """Refuses groups that the rule wouldn't make again."""
    if len(groups) < 2:
        return
    faults = Faults(_misplaced(groups, shapes))
    if len(groups) > 2:
        faults.add(f"are {len(groups)} groups", "param_groups")
    elif all(groups[0][name] == groups[1][name] for name in MULTIPLIERS):
        faults.add("have the same multipliers", "param_groups")
    if faults:
        raise faults.error(
            InexactError,
            "Megatron-Core's files don't say which parameters a group moves, and its rule makes other groups.",
            expected="one group, or those named *.bias and those of one axis apart, without weight decay",
            remedy="write another container, such as dcp",
        )


def _misplaced(groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Shape]) -> Iterable[tuple[str, str]]:
    for group in groups:
        for name in group["params"]:
            if _has_no_decay(name, shapes[name]) != _is_without_decay(group):
                yield "stands with weight decay" if not _is_without_decay(group) else "stands without", name
