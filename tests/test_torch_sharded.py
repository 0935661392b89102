"""Optimizers of statekit.torch over sharded parameters: what two processes do together is what one does alone."""

from __future__ import annotations

from pathlib import Path

import drivers
import pytest
import torch_sharding
from torch_sharding import CASES, run_sharded, updates_stay_within_the_bound

pytestmark = pytest.mark.torch


def test_updates_attested_parts_and_checkpoints_in_two_processes(tmp_path: Path) -> None:
    large = ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "statekit.torch"]
    done = drivers.run(torch_sharding.__file__, tmp_path, imports=large)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_updates_of_every_case_stay_within_the_bound(tmp_path: Path) -> None:
    run_sharded(updates_stay_within_the_bound, tmp_path, range(len(CASES)), (0, 2))
