"""PyTorch's and Transformers' optimizers, which load what torch.load reads of a file that was just written."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from statekit.arrays.backend import backend
from statekit.state.train_state import TrainState
from statekit.torch.live import live_checkpoint, live_state
from statekit.verify.natives import Native, Rates, Updates, written


def runner(name: str, variant: str) -> Native:
    """Returns what makes updates with a class."""
    constructor = _class(name)

    def run(state: TrainState, updates: Updates, rates: Rates) -> TrainState:
        with tempfile.TemporaryDirectory() as folder:
            path = written(state, "torch", "torch-optim", Path(folder))
            saved = torch.load(path, weights_only=True)
        params = params_of(state)
        groups = [{"params": [params[path] for path in group.paths]} for group in state.optimizer.groups]
        optimizer = constructor(groups)
        optimizer.load_state_dict(saved["optimizer"])
        return moved(optimizer, params, updates, rates)

    return run


def _class(name: str) -> Any:
    kind = name.rpartition(".")[2]
    if name.startswith("transformers."):
        from transformers import optimization

        return getattr(optimization, kind)
    return getattr(torch.optim, kind)


def params_of(state: TrainState) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters of a state by path."""
    xp = backend("torch")
    return {path: torch.nn.Parameter(xp.asarray(param.read())) for path, param in state.params.items()}


def moved(
    optimizer: torch.optim.Optimizer, params: Mapping[str, torch.nn.Parameter], updates: Updates, rates: Rates
) -> TrainState:
    """Returns the state after updates."""
    xp = backend("torch")
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate
    for grads in updates:
        for path, param in params.items():
            param.grad = xp.asarray(grads[path]) if path in grads else None
        optimizer.step()
    named: dict[str, Any] = {path.replace("/", "."): param for path, param in params.items()}
    return live_state(live_checkpoint(named, [optimizer], {}))
