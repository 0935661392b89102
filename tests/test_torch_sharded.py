"""Optimizers of statekit.torch over sharded parameters: what two processes do together is what one does alone."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch_sharding import (
    CASES,
    OPTIMIZERS,
    checkpoints_go_round,
    in_turn,
    network,
    parts_are_attested,
    run_sharded,
    train,
    updates_stay_within_the_bound,
)

import statekit.torch

pytestmark = pytest.mark.torch


SAMPLE = [i for i, case in enumerate(CASES) if case[1] in ("t5x", "zip2025", "mxnet_unfused")]


def test_updates_attested_parts_and_checkpoints_in_two_processes(tmp_path: Path) -> None:
    """All three in the same two processes, since it takes longer to start them than to do it."""
    for name, options in OPTIMIZERS.items():
        model = network()
        optimizer = getattr(statekit.torch, name)(model.named_parameters(), lr=0.05, **options)
        train(model, optimizer, 0, 2)
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, 2, 2)
        torch.save({**saved, "later": model.state_dict()}, tmp_path / f"{name}.pt")
    model = network()
    adam = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, adam, 0, 2)
    saved = {"model": model.state_dict(), "optimizer": adam.state_dict()}
    torch.save({**saved, "names": [name for name, _ in model.named_parameters()]}, tmp_path / "run.pt")
    run_sharded(
        in_turn, tmp_path, (updates_stay_within_the_bound, SAMPLE, (1,)), (checkpoints_go_round,),
        (parts_are_attested, False), (parts_are_attested, True),
    )  # fmt: skip


@pytest.mark.slow
def test_updates_of_every_case_stay_within_the_bound(tmp_path: Path) -> None:
    run_sharded(updates_stay_within_the_bound, tmp_path, range(len(CASES)), (0, 2))
