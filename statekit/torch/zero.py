"""A run under DeepSpeed, whose optimizer moves pieces or copies: its parameters and their slots as wholes.

ZeRO puts parameters behind one another and gives each process a piece. What the run's checkpoint holds by parameter is
gathered here by DeepSpeed's own calls, which all processes make; each then has all of it. Where parameters are of less
than float32, the optimizer moves masters of float32, with ZeRO and without; they are the parameters of the run then.
Source: deepspeedai/DeepSpeed, deepspeed/utils/tensor_fragment.py, `safe_get_full_fp32_param`,
`safe_get_full_optimizer_state`; runtime/zero/stage_1_and_2.py, `bit16_groups`; runtime/zero/stage3.py, `fp16_groups`;
runtime/bf16_optimizer.py; runtime/fp16/fused_optimizer.py, `fp32_groups_flat`, and unfused_optimizer.py, `fp32_groups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

_STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
_GROUPS = {
    "DeepSpeedZeroOptimizer": "bit16_groups",
    _STAGE_3: "fp16_groups",
    "BF16_Optimizer": "bf16_groups",
    "FP16_Optimizer": "fp16_groups",
    "FP16_UnfusedOptimizer": "fp16_groups",
}
"""Where DeepSpeed's optimizers keep the parameters of each group, by class."""
_UNCUT = ("FP16_Optimizer", "FP16_UnfusedOptimizer")
_OF_A_PIECE = ("RMS",)
"""What an optimizer takes of its own process' piece, and takes anew before it uses it: Hugging Face's Adafactor."""
_Moved: TypeAlias = tuple[torch.nn.Parameter, torch.Tensor, Mapping[str, Any]]
"""A parameter of the model, its master, and the master's slots, all as wholes."""


def zero_optimizer(optimizer: Any) -> Any:
    """Returns DeepSpeed's optimizer inside of wrappers; None where there is none."""
    while optimizer is not None and type(optimizer).__name__ not in _GROUPS:
        inner = getattr(optimizer, "optimizer", None)
        optimizer = None if inner is optimizer else inner
    return optimizer


def gathered(
    zero: Any, model: torch.nn.Module
) -> tuple[torch.optim.Optimizer, list[tuple[str, torch.nn.Parameter]]]:
    """Returns an optimizer with the whole parameters and slots of a run, and the parameters by name."""
    inner: torch.optim.Optimizer = zero.optimizer
    of_groups = list(_of_groups(zero))
    masters = _copies(zero) if type(zero).__name__ in _UNCUT else _joined(zero)
    # All processes get here in one order of parameters: each makes a call that the others wait for.
    moved = {param: (_as_it_computes(param, master), slots) for param, master, slots in masters}
    named = [
        (name, moved[param][0] if param in moved else _full(param))
        for name, param in model.named_parameters()
    ]
    groups = [
        {**group, "params": [moved[param][0] for param in params]}
        for group, params in zip(inner.param_groups, of_groups, strict=True)
    ]
    optimizer: torch.optim.Optimizer = object.__new__(type(inner))
    torch.optim.Optimizer.__init__(optimizer, groups, inner.defaults)
    for param, slots in moved.values():
        optimizer.state[param] = dict(slots)
    return optimizer, named


def _full(param: torch.nn.Parameter) -> torch.nn.Parameter:
    """Returns a whole parameter of the model: ZeRO 3 leaves each process a piece of it."""
    if not hasattr(param, "ds_id"):
        return param
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([param]):
        return torch.nn.Parameter(param.detach().clone(), param.requires_grad)


def _as_it_computes(param: torch.nn.Parameter, master: torch.Tensor) -> torch.nn.Parameter:
    """Returns a parameter's master; the model's own weight where that isn't what the master is rounded to."""
    model_weight = _full(param).detach()
    is_rounded = torch.equal(master.to(model_weight.dtype), model_weight)
    return torch.nn.Parameter(master if is_rounded else model_weight.to(master.dtype), param.requires_grad)


def _of_groups(zero: Any) -> Iterator[Sequence[torch.nn.Parameter]]:
    """Yields the parameters of each group; ZeRO 3 cuts a group into several that are handled one by one."""
    of_groups = getattr(zero, _GROUPS[type(zero).__name__])
    if type(zero).__name__ != _STAGE_3:
        yield from of_groups
        return
    for number in range(len(zero.optimizer.param_groups)):
        numbers = zero.sub_group_to_group_id
        yield [param for i, part in enumerate(of_groups) if numbers[i] == number for param in part]


def _joined(zero: Any) -> Iterator[_Moved]:
    """Yields parameters that ZeRO has cut, each with its whole master and slots, by calls that all processes make."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if any(zero.optimizer.state.values()) and hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._lazy_init_hp_params_optimizer_state()  # its next step does it: pieces are found by it
    for params, record in _records(zero):
        # A count has no axis, and is that of all that lies behind one another; what is cut as parameters are has one.
        cut = [key for key, part in record.items() if isinstance(part, torch.Tensor) and part.dim()]
        shared = {key: part for key, part in record.items() if key not in (*cut, *_OF_A_PIECE)}
        for param in params:
            shape = getattr(param, "ds_shape", param.shape)
            slots = {key: safe_get_full_optimizer_state(param, key).reshape(shape) for key in cut}
            yield param, safe_get_full_fp32_param(param).reshape(shape).clone(), {**shared, **slots}


def _records(zero: Any) -> Iterator[tuple[Sequence[torch.nn.Parameter], Mapping[str, Any]]]:
    """Yields parameters that lie behind one another, with what the optimizer keeps of this process' piece of them."""
    of_groups = getattr(zero, _GROUPS[type(zero).__name__])
    if type(zero).__name__ == _STAGE_3:
        pieces = zero.fp32_partitioned_groups_flat
    else:
        pieces = [group["params"][0] for group in zero.optimizer.param_groups]
    for params, piece in zip(of_groups, pieces, strict=True):
        yield params, zero.optimizer.state.get(piece, {})


def _copies(zero: Any) -> Iterator[_Moved]:
    """Yields parameters with the master and the slots that each process has of them as wholes."""
    for number, params in enumerate(zero.fp16_groups):
        if hasattr(zero, "fp32_groups_flat"):
            yield from _unflattened(params, zero.fp32_groups_flat[number], zero.optimizer.state)
            continue
        for param, master in zip(params, zero.fp32_groups[number], strict=True):
            yield param, master.detach(), zero.optimizer.state[master]


def _unflattened(
    params: Sequence[torch.nn.Parameter], flat: torch.Tensor, state: Mapping[torch.Tensor, Mapping[str, Any]]
) -> Iterator[_Moved]:
    """Yields the parameters that lie behind one another in a flat master."""
    start = 0
    for param in params:

        def piece(value: Any, start: int = start, param: torch.nn.Parameter = param) -> Any:
            is_flat = isinstance(value, torch.Tensor) and value.shape == flat.shape
            return value.detach()[start : start + param.numel()].reshape(param.shape) if is_flat else value

        yield param, piece(flat), {key: piece(value) for key, value in state[flat].items()}
        start += param.numel()
