"""A run under DeepSpeed's ZeRO, whose optimizer moves flat pieces: its parameters and their slots as wholes.

ZeRO puts parameters behind one another and gives each process a piece. What the run's checkpoint holds by parameter is
gathered here by DeepSpeed's own calls, which all processes make; each then has all of it.
Source: deepspeedai/DeepSpeed, deepspeed/utils/tensor_fragment.py, `safe_get_full_fp32_param`,
`safe_get_full_optimizer_state`; runtime/zero/stage_1_and_2.py, `bit16_groups`; runtime/zero/stage3.py, `fp16_groups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from statekit.errors import UsageError

_STAGES_1_AND_2, _STAGE_3 = "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"


def zero_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer of ZeRO inside of wrappers; None where there is none."""
    while optimizer is not None and type(optimizer).__name__ not in (_STAGES_1_AND_2, _STAGE_3):
        inner = getattr(optimizer, "optimizer", None)
        optimizer = None if inner is optimizer else inner
    return optimizer


def is_low(model: torch.nn.Module) -> bool:
    """Tells whether a model has parameters of less than float32, of which ZeRO moves copies."""
    return any(param.dtype.itemsize < 4 for param in model.parameters())


def gathered(
    zero: Any, model: torch.nn.Module
) -> tuple[torch.optim.Optimizer, list[tuple[str, torch.nn.Parameter]]]:
    """Returns an optimizer with the whole parameters and slots of a run, and the parameters by name.

    Args:
        zero: ZeRO's optimizer.
        model: The model, without wrappers.

    Raises:
        UsageError: The model has parameters of less than float32.
    """
    if is_low(model):
        raise UsageError(
            "A run under ZeRO is attested where its parameters are of float32.",
            found=", ".join({str(param.dtype) for param in model.parameters()}),
            remedy="attest what DeepSpeed saves next: statekit diff of both checkpoints",
        )
    inner: torch.optim.Optimizer = zero.optimizer
    slots, counts = _kinds(zero)
    wholes, named = dict[torch.nn.Parameter, _Whole](), list[tuple[str, torch.nn.Parameter]]()
    for name, param in model.named_parameters():
        wholes[param] = _whole(param, slots)
        named.append((name, wholes[param].param))
    groups = [
        {**group, "params": [wholes[param].param for param in of_group]}
        for group, of_group in zip(inner.param_groups, _of_groups(zero), strict=True)
    ]
    optimizer: torch.optim.Optimizer = object.__new__(type(inner))
    torch.optim.Optimizer.__init__(optimizer, groups, inner.defaults)
    for of_group in _of_groups(zero):
        for param in of_group:
            optimizer.state[wholes[param].param] = {**counts, **wholes[param].slots}
    return optimizer, named


@dataclass(frozen=True)
class _Whole:
    """A whole parameter and its slots."""

    param: torch.nn.Parameter
    slots: Mapping[str, torch.Tensor]


def _kinds(zero: Any) -> tuple[list[str], dict[str, Any]]:
    """Returns the names of the slots that are cut as parameters are, and what every parameter has alike."""
    record: Mapping[str, Any] = next((slots for slots in zero.optimizer.state.values() if slots), {})
    slots = [key for key, part in record.items() if isinstance(part, torch.Tensor) and part.numel() > 1]
    if slots and type(zero).__name__ == _STAGES_1_AND_2:  # as its next step does: the pieces are found by it
        zero._lazy_init_hp_params_optimizer_state()
    return slots, {key: part for key, part in record.items() if key not in slots}


def _whole(param: torch.nn.Parameter, slots: Sequence[str]) -> _Whole:
    """Returns a whole parameter with its slots; one that ZeRO doesn't move has none."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    shape = getattr(param, "ds_shape", param.shape)
    full = safe_get_full_fp32_param(param)
    if full is None:
        return _Whole(param, {})
    whole_slots = {key: safe_get_full_optimizer_state(param, key).reshape(shape) for key in slots}
    return _Whole(torch.nn.Parameter(full.reshape(shape).clone(), param.requires_grad), whole_slots)


def _of_groups(zero: Any) -> Iterator[Sequence[torch.nn.Parameter]]:
    """Yields the parameters of each group; ZeRO 3 cuts a group into several that are handled one by one."""
    if type(zero).__name__ == _STAGES_1_AND_2:
        yield from zero.bit16_groups
        return
    for number in range(len(zero.optimizer.param_groups)):
        numbers = zero.sub_group_to_group_id
        yield [param for i, part in enumerate(zero.fp16_groups) if numbers[i] == number for param in part]
