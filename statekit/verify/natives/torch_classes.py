"""PyTorch's and Transformers' optimizers, which load what torch.load reads of a file, and statekit's own of PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

import statekit.torch
from statekit.arrays.backend import backend
from statekit.state.train_state import TrainState
from statekit.torch.live import live_checkpoint, live_state
from statekit.verify.natives import Native, Rates, Updates, written

Params: TypeAlias = dict[str, torch.nn.Parameter]


def runner(name: str, variant: str) -> Native:
    """Returns what makes updates with a class; `statekit.torch` is that of a state's optimizer."""
    make = _drop_in if name == "statekit.torch" else _class_of(name)

    def run(state: TrainState, updates: Updates, rates: Rates) -> TrainState:
        params = _params_of(state)
        return _moved(make(state, params, variant), params, updates, rates)

    return run


def _drop_in(state: TrainState, params: Params, variant: str) -> torch.optim.Optimizer:
    """Returns statekit's own optimizer, as somebody loads it who goes on from a file."""
    named = [(path.replace("/", "."), param) for path, param in params.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = written(state, "torch", "statekit-torch", Path(folder))
        return statekit.torch.load_optimizer(path, named, variant=variant)


def _class_of(name: str) -> Callable[[TrainState, Params, str], torch.optim.Optimizer]:
    constructor = _class(name)

    def loaded(state: TrainState, params: Params, variant: str) -> torch.optim.Optimizer:
        with tempfile.TemporaryDirectory() as folder:
            path = written(state, "torch", "torch-optim", Path(folder))
            saved = torch.load(path, weights_only=True)
        groups = [{"params": [params[path] for path in group.paths]} for group in state.optimizer.groups]
        optimizer: torch.optim.Optimizer = constructor(groups)
        optimizer.load_state_dict(saved["optimizer"])
        return optimizer

    return loaded


def _class(name: str) -> Any:
    kind = name.rpartition(".")[2]
    if name.startswith("transformers."):
        from transformers import optimization

        return getattr(optimization, kind)
    return getattr(torch.optim, kind)


def _params_of(state: TrainState) -> Params:
    """Returns the parameters of a state by path."""
    xp = backend("torch")
    return {path: torch.nn.Parameter(xp.asarray(param.read())) for path, param in state.params.items()}


def _moved(optimizer: torch.optim.Optimizer, params: Params, updates: Updates, rates: Rates) -> TrainState:
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
