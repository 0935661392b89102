"""A run of Transformers' Trainer goes on in Optax by the printed lines, and comes back as if it had never left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.jax, pytest.mark.slow]
IN_OPTAX = 1e-5
"""Largest difference after 20 updates on the same gradients, of the tensor's largest movement."""
BACK = 5e-5
"""The same after ten more updates in Trainer, whose gradients follow from the weights."""


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_twenty_updates_in_optax_and_back_through_two_saves(kind: str, tmp_path: Path) -> None:
    """At b103f67 GPT-2's two groups were one chain without a mask, which `optax.adamw(mask=...)` couldn't restore."""
    script = Path(__file__).with_name("hf_optax_driving.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path, kind], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert all(found["groups"])
    assert ("mask=mask" in found["lines"]) == (kind == "gpt2")
    assert found["optax"] <= IN_OPTAX, found["optax"]
    assert found["saved"] == ["checkpoint-30", "checkpoint-35"]
    (losses, rates), (meant, due) = np.transpose(found["log"]), np.transpose(found["expected"])
    assert len(losses) == 10
    np.testing.assert_allclose(rates, due, rtol=1e-12)
    np.testing.assert_allclose(losses, meant, rtol=1e-5)
    # GPT-2's keys have a bias without effect: its gradients are rounding, which AdamW makes steps of.
    assert {n: x for n, x in found["weights"].items() if x > BACK and "c_attn.bias" not in n} == {}
