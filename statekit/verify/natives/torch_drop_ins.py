"""statekit's own optimizers of PyTorch, as somebody loads them who goes on from a file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import statekit.torch
from statekit.state.train_state import TrainState
from statekit.verify.natives import Native, Rates, Updates, written
from statekit.verify.natives.torch_classes import moved, params_of


def runner(name: str, variant: str) -> Native:
    """Returns what makes updates with the class of a state's optimizer."""

    def run(state: TrainState, updates: Updates, rates: Rates) -> TrainState:
        params = params_of(state)
        named = [(path.replace("/", "."), param) for path, param in params.items()]
        with tempfile.TemporaryDirectory() as folder:
            path = written(state, "torch", "statekit-torch", Path(folder))
            optimizer = statekit.torch.load_optimizer(path, named, variant=variant)
        return moved(optimizer, params, updates, rates)

    return run
