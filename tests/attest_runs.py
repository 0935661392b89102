"""Small runs in PyTorch that are saved, resumed and attested."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import statekit.torch
from statekit.attestation.attestation import Attestation


@dataclass
class Run:
    """A run: what a program has in its hands."""

    model: Any
    optimizer: Any
    scheduler: Any
    scaler: Any


def network() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))


def made(kind: str = "adamw", model: Any = None, exchanged: bool = False) -> Run:
    model = model or network()
    pairs = list(model.named_parameters())
    if kind == "statekit":
        optimizer: Any = statekit.torch.Adafactor(pairs, lr=0.01, variant="t5x", factored=False)
    elif kind in ("lamb", "lans", "scaled_adam"):
        names = {"lamb": "LAMB", "lans": "LANS", "scaled_adam": "ScaledAdam"}
        optimizer = getattr(statekit.torch, names[kind])(pairs, lr=0.01)
    elif kind == "hf":
        from transformers.optimization import Adafactor

        optimizer = Adafactor(model.parameters(), lr=0.01, relative_step=False, scale_parameter=False)
    elif kind == "adafactor":
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    else:
        groups = [
            {"params": [p for _, p in pairs if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in pairs if p.dim() < 2], "weight_decay": 0.0},
        ]
        if exchanged:
            decays = [group["weight_decay"] for group in groups]
            for group, decay in zip(groups, reversed(decays), strict=True):
                group["weight_decay"] = decay
        optimizer = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[kind](groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 10)
    return Run(model, optimizer, scheduler, torch.amp.GradScaler("cpu", init_scale=65536.0))


def trained(run: Run, updates: int = 3) -> Run:
    torch.manual_seed(2)
    for _ in range(updates):
        run.optimizer.zero_grad()
        (run.model(torch.randn(5, 4)) ** 2).sum().backward()
        run.optimizer.step()
        run.scheduler.step()
    return run


def saved(run: Run, path: Path, **others: Any) -> Path:
    parts = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    parts |= {"scheduler": run.scheduler.state_dict(), "scaler": run.scaler.state_dict()}
    torch.save({key: part for key, part in {**parts, **others}.items() if part is not None}, path)
    return path


def loaded(path: Path, run: Run) -> Run:
    stored = torch.load(path, weights_only=False)
    run.model.load_state_dict(stored["model"])
    run.optimizer.load_state_dict(stored["optimizer"])
    run.scheduler.load_state_dict(stored["scheduler"])
    if "scaler" in stored:
        run.scaler.load_state_dict(stored["scaler"])
    return run


def attested(run: Run, path: Path, **options: Any) -> Attestation:
    return statekit.torch.attest(
        run.optimizer,
        run.model.named_parameters(),
        path,
        scheduler=run.scheduler,
        scaler=run.scaler,
        **options,
    )
