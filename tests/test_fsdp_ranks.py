"""FSDP1's files of ranks: what is no flat parameter's optimizer is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import statekit
from goldens import COMPACT
from statekit.errors import FormatError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

RANKS = COMPACT / "torch_formats" / "adamw_fsdp1_rank_local_flat" / "checkpoint"
WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "groups are an object": lambda rank: rank["optimizer"].update(param_groups=object),
    "groups are a number": lambda rank: rank["optimizer"].update(param_groups=3),
    "a group is a number": lambda rank: rank["optimizer"].update(param_groups=[3]),
    "two groups": lambda rank: rank["optimizer"].update(param_groups=[{}, {}]),
    "the state is a list": lambda rank: rank["optimizer"].update(state=[1]),
    "no state": lambda rank: rank["optimizer"].pop("state"),
    "the optimizer is a list": lambda rank: rank.update(optimizer=[1]),
    "a shape is a number": lambda rank: rank.update(shapes=[3] * len(rank["shapes"])),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_optimizer_of_a_flat_parameter_is_refused(wrong: str, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    shutil.copytree(RANKS, folder)
    for file in sorted(folder.iterdir()):
        rank = torch.load(file, weights_only=False)
        WRONG[wrong](rank)
        torch.save(rank, file)
    with pytest.raises(FormatError, match="flat parameter"), statekit.open(folder, container="fsdp1-ranks"):
        pass
