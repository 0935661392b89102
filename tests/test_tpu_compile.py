"""Every optimizer's step compiles for TPUs. In a process of its own: libtpu settles the platform for all of JAX."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.jax,
    pytest.mark.tpu,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu isn't installed"),
]
SCRIPT = Path(__file__).parent / "tpu_steps.py"
RULES = ("adafactor", "scaled_adam", "lans", "lamb", "adamw")
LARGEST = {"adafactor": 2.01, "scaled_adam": 1.44, "lans": 1.72, "lamb": 1.44, "adamw": 1.001}
"""Bytes accessed over the least possible: where norms and means must be known before a tensor moves, more than 1."""


def compiled(rules: str, kinds: str, dtypes: str, size: int) -> list[dict[str, object]]:
    command = [sys.executable, str(SCRIPT), rules, kinds, dtypes, str(size), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_step_compiles_for_a_tpu_and_holds_nothing_more_in_between() -> None:
    programs = compiled(",".join(RULES), "v5e", "float32", 8192)
    assert [one["rule"] for one in programs] == list(RULES)
    over = {
        str(one["rule"]): one["ratio"]
        for one in programs
        if float(str(one["ratio"])) > LARGEST[str(one["rule"])]
    }
    assert not over


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["v4", "v5e", "v5p"])
def test_every_step_compiles_for_every_tpu(kind: str) -> None:
    programs = compiled(",".join(RULES), kind, "float32,bfloat16", 512)
    assert len(programs) == 2 * len(RULES)
