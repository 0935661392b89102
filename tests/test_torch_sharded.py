"""Optimizers of statekit.torch over sharded parameters: what two processes do together is what one does alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch_sharding import (
    CASES,
    OPTIMIZERS,
    checkpoints_go_round,
    network,
    parts_are_attested,
    run_sharded,
    train,
    updates_stay_within_the_bound,
)

import statekit.torch

pytestmark = pytest.mark.torch


SAMPLE = [i for i, case in enumerate(CASES) if case[1] in ("t5x", "zip2025", "mxnet_unfused")]


@pytest.mark.parametrize(
    ("cases", "updates"),
    [
        pytest.param(SAMPLE, (1,), id="sample"),
        pytest.param(range(len(CASES)), (0, 2), id="all", marks=pytest.mark.slow),
    ],
)
def test_updates_stay_within_the_bound(cases: Sequence[int], updates: Sequence[int], tmp_path: Path) -> None:
    run_sharded(updates_stay_within_the_bound, tmp_path, cases, updates)


def test_checkpoints_go_round(tmp_path: Path) -> None:
    for name, options in OPTIMIZERS.items():
        model = network()
        optimizer = getattr(statekit.torch, name)(model.named_parameters(), lr=0.05, **options)
        train(model, optimizer, 0, 2)
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, 2, 2)
        torch.save({**saved, "later": model.state_dict()}, tmp_path / f"{name}.pt")
    run_sharded(checkpoints_go_round, tmp_path)


@pytest.mark.parametrize("flat", [False, True], ids=["FSDP2", "FSDP1"])
def test_parts_are_attested_where_they_are(flat: bool, tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, 0, 2)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**saved, "names": [name for name, _ in model.named_parameters()]}, tmp_path / "run.pt")
    run_sharded(parts_are_attested, tmp_path, flat)
