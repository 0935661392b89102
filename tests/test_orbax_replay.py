"""Runs of Optax go on from the checkpoints that Orbax wrote of them, in every backend."""

from __future__ import annotations

import pytest
from test_orbax_read import RECORDED

from goldens import GOLDEN
from replaying import everywhere
from statekit.arrays.backend import backend
from statekit.verify.recording import open_recording
from statekit.verify.replay import Subject, replay

CASES = [bundle.name for bundle, _ in RECORDED]
QUICK = [name for name in ("adafactor_orbax_v1",) if name in CASES]


@pytest.mark.parametrize(("name", "case"), everywhere(CASES, QUICK))
def test_a_run_goes_on_from_its_checkpoint(name: str, case: str) -> None:
    with open_recording(GOLDEN / "optax_adafactor" / case) as recording:
        result = replay(Subject(recording), backend(name))
    assert result.decoded == ()
    assert result.start == "checkpoint" and result.steps[0] > 0
    assert result.passed
