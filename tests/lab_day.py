"""A day in a lab: a run of T5X goes on in PyTorch and writes steps, of which one has lost its moments.

What happens outside of the service, of the story that tests tell through its interface and in a browser.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch

import statekit
from goldens import COMPACT

T5 = COMPACT / "t5x_train" / "t5_11_unscanned" / "checkpoint"
FIRST, OLD, BAD, GOOD = "step-8.pt", "step-9.pt", "step-10.pt", "step-11.pt"
"""The steps: where it goes on, an older one, the one without moments, and the last."""
CONFIG = {"num_heads": 4}
"""What the map to Transformers' model needs to know."""


def begin(run: Path) -> None:
    """Writes the step that T5X's run has come to, as PyTorch goes on from it."""
    run.mkdir(parents=True)
    statekit.convert(T5, run / FIRST, layout="statekit-torch")


def train(run: Path) -> None:
    """Goes on in PyTorch, and writes three steps, one of them with its moments lost."""
    import statekit.torch as adopted

    model = torch.load(run / FIRST, weights_only=True)["model"]
    params = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in model.items()}
    optimizer = adopted.load_optimizer(run / FIRST, params.items(), lr=1e-3)
    chance = torch.Generator().manual_seed(0)
    for name in (OLD, BAD, GOOD):
        for param in params.values():
            param.grad = 0.01 * torch.randn(param.shape, generator=chance)
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        if name == BAD:
            for kept in state["state"].values():
                kept |= {key: torch.zeros_like(one) for key, one in kept.items() if one.ndim}
        step = int(name.removesuffix(".pt").rpartition("-")[2])
        torch.save({"model": dict(params), "optimizer": state, "step": step}, run / name)


def resumed(path: Path) -> bool:
    """Goes on from a checkpoint, and tells whether what is live is what it holds."""
    import statekit.torch as adopted

    model = torch.load(path, weights_only=True)["model"]
    untied = {name: one for name, one in model.items() if not name.endswith("embed_tokens.weight")}
    params = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in untied.items()}
    optimizer = adopted.load_optimizer(path, params.items(), lr=1e-3)
    return adopted.attest(optimizer, params.items(), path).passed
