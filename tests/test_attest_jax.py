"""Attesting a live run in JAX: sharded arrays on eight devices, restored by Orbax, rightly and wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

pytestmark = pytest.mark.jax


def test_runs_with_optax_and_orbax_are_attested(tmp_path: Path) -> None:
    script = Path(__file__).with_name("attest_jax_driving.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert {*result} == {"adamw", "adafactor", "statekit"}
    assert result["adamw"].pop("reset") == ["schedule"]
    for kind, names in result.items():
        assert "slot-rounded" in names.pop("cast"), kind  # Adafactor's state shows its momentum's dtype too
        assert names == {
            "honest": [],
            "unused": ["optimizer-empty"],
            "weights": ["parameter-differs"],
            "exchanged": ["parameter-differs"],
        }, kind
