"""A right resume is never an alarm, whatever its schedule; a wrong one is named, and later rates by their reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from statekit.torch import attest

pytestmark = pytest.mark.torch
RATE, HORIZONS = 0.01, (7, 40, 1000)
Make = Callable[[Any, int], Any]
LATE = torch.optim.lr_scheduler
TORCH: dict[str, Make] = {
    "ConstantLR": lambda o, n: LATE.ConstantLR(o, 0.5, n),
    "LinearLR": lambda o, n: LATE.LinearLR(o, 0.1, 1.0, n),
    "PolynomialLR": lambda o, n: LATE.PolynomialLR(o, n, 2.0),
    "CosineAnnealingLR": lambda o, n: LATE.CosineAnnealingLR(o, n, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o, n: LATE.CosineAnnealingWarmRestarts(o, max(n // 2, 1)),
    "ExponentialLR": lambda o, n: LATE.ExponentialLR(o, 1 - 1 / n),
    "StepLR": lambda o, n: LATE.StepLR(o, max(n // 3, 1), 0.5),
    "MultiStepLR": lambda o, n: LATE.MultiStepLR(o, [n // 2, n - 1], 0.5),
    "OneCycleLR": lambda o, n: LATE.OneCycleLR(o, RATE, n),
    "CyclicLR": lambda o, n: LATE.CyclicLR(o, RATE / 10, RATE, max(n // 4, 1), cycle_momentum=False),
    "SequentialLR": lambda o, n: LATE.SequentialLR(
        o, [LATE.LinearLR(o, 0.1, 1.0, 2), LATE.CosineAnnealingLR(o, n - 2)], [2]
    ),
    "LambdaLR": lambda o, n: LATE.LambdaLR(o, lambda step: max(0.0, 1 - step / n)),
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "constant": {},
    "constant_with_warmup": {},
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 3},
}
ENDLESS = {"constant", "constant_with_warmup", "inverse_sqrt"}
"""Schedules that don't know how long the run is."""


def of_transformers(kind: str, optimizer: Any, horizon: int) -> Any:
    from transformers import get_scheduler

    special = TRANSFORMERS[kind] or None
    return get_scheduler(kind, optimizer, 2, horizon, special)


def made(make: Make, horizon: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    return model, optimizer, make(optimizer, horizon)


def saved(make: Make, horizon: int, path: Path, arguments: dict[str, Any] | None) -> int:
    """Trains for two thirds of a run and saves; returns the updates done."""
    model, optimizer, scheduler = made(make, horizon)
    done = max(2 * horizon // 3, 1)
    for _ in range(done):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        scheduler.step()
    plain = {key: one for key, one in scheduler.state_dict().items() if not callable(one)}
    if "_schedulers" in plain:
        plain["_schedulers"] = [dict(one) for one in plain["_schedulers"]]
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": plain}
    if arguments is not None:
        beside = {"trainer_state": {"max_steps": horizon, "global_step": done}}
        parts |= {**beside, "trainer_arguments": {**arguments, "max_steps": horizon, "warmup_steps": 2}}
    torch.save(parts, path)
    return done


def resumed(make: Make, horizon: int, path: Path, *, schedule: bool = True, **options: Any) -> Any:
    """Returns what is said of a resume as Trainer makes it: both states loaded into what its arguments make."""
    model, optimizer, scheduler = made(make, horizon)
    stored = torch.load(path, weights_only=False)
    model.load_state_dict(stored["model"])
    if schedule:
        scheduler.load_state_dict({**scheduler.state_dict(), **stored["scheduler"]})
    optimizer.load_state_dict(stored["optimizer"])
    return attest(optimizer, model, path, scheduler=scheduler, **options)


def cases() -> list[Any]:
    every: list[tuple[str, Make, Any]] = [(f"torch {name}", make, None) for name, make in TORCH.items()]
    for name, special in TRANSFORMERS.items():
        arguments = {"lr_scheduler_type": name, "learning_rate": RATE, "lr_scheduler_kwargs": special or None}
        every.append((f"transformers {name}", partial(of_transformers, name), arguments))
    return [pytest.param(*one, id=one[0]) for one in every]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "make", "arguments"), cases())
def test_a_right_resume_passes_and_another_length_is_named(
    name: str, make: Make, arguments: dict[str, Any] | None, tmp_path: Path
) -> None:
    for horizon in HORIZONS:
        path = tmp_path / f"{horizon}.pt"
        saved(make, horizon, path, arguments)
        right = resumed(make, horizon, path)
        assert right.passed, f"{horizon}: {right}"
        assert not right.warnings
        restarted = resumed(make, horizon, path, schedule=False, strict_schedule=False)
        assert "schedule" in [one.name for one in restarted.findings], f"{horizon}: {restarted}"
        if arguments is None or name.rsplit(maxsplit=1)[-1] in ENDLESS:
            continue
        longer = resumed(make, 2 * horizon, path, strict_schedule=False)
        assert longer.passed, f"{horizon}: {longer}"
        if "warmup_stable_decay" not in name:  # which may stand at its highest rate in both
            assert f"max_steps {horizon} -> {2 * horizon}" in str(longer), f"{horizon}: {longer}"
            strict = resumed(make, 2 * horizon, path)
            assert not strict.passed
            assert f"max_steps {horizon} -> {2 * horizon}" in str(strict)
