"""The optimizers of `steps.py` in PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from steps import Entrant, Entrants

import statekit.torch as ours

RATE = 1e-3


@cache
def _grads(count: int, side: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn((side, side), generator=random) for _ in range(count)]


def _named(count: int, side: int) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns parameters of their own memory, with the gradients that all entrants share."""
    named = []
    for i, grad in enumerate(_grads(count, side)):
        param = torch.nn.Parameter(grad.flip(0) * 0.1)
        param.grad = grad
        named.append((f"layer_{i}.weight", param))
    return named


def _peer(rule: str, kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Entrant:
    return Entrant(
        rule, lambda count, side: kind([param for _, param in _named(count, side)], lr=RATE, **options).step
    )


def _our(rule: str, kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Entrant:
    return Entrant(rule, lambda count, side: kind(_named(count, side), lr=RATE, **options).step, ours=True)


def _transformers() -> Entrants:
    if importlib.util.find_spec("transformers") is None:
        return {}
    kind = importlib.import_module("transformers.optimization").Adafactor
    return {"transformers Adafactor": _peer("adafactor", kind, relative_step=False)}


ENTRANTS: Entrants = {
    "torch AdamW, fused": _peer("adamw", torch.optim.AdamW, fused=True),
    "torch AdamW, foreach": _peer("adamw", torch.optim.AdamW, foreach=True),
    "torch Adafactor, foreach": _peer("adafactor", torch.optim.Adafactor, foreach=True),
    **_transformers(),
    "Adafactor": _our("adafactor", ours.Adafactor),
    "Adafactor, all factored": _our("adafactor", ours.Adafactor, min_dim_size_to_factor=1),
    "AdamW": _our("adamw", ours.AdamW),
    "LAMB": _our("lamb", ours.LAMB),
    "LANS": _our("lans", ours.LANS),
    "ScaledAdam": _our("scaled_adam", ours.ScaledAdam),
}
"""Adafactor as T5X has it leaves matrices below 128 unfactored; others factor all."""
