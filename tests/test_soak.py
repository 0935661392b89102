"""A sample of the soak (`make soak`): whatever goes wrong, a target is absent or complete, and memory doesn't grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_sample_of_conversions_that_go_wrong() -> None:
    script = Path(__file__).with_name("soak.py")
    line = [sys.executable, str(script), "--cases", "12", "--quiet"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
    summary = json.loads(done.stdout)
    assert summary["bad"] == [] and summary["growth"] < 16, done.stdout
