"""A run of Transformers' Trainer goes on in Optax by the printed lines, and comes back as if it had never left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import drivers
import numpy as np
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.jax, pytest.mark.slow]
IN_OPTAX = 1e-5
"""Largest difference after 20 updates on the same gradients, of the tensor's largest movement."""
BACK = 5e-5
"""The same after ten more updates in Trainer, whose gradients follow from the weights."""
NOTHING = 1e-6
"""Largest gradient, of the queries' bias', that a bias without effect has by rounding."""


def driven(folder: Path, *words: str) -> dict[str, Any]:
    """Runs hf_optax_driving.py, and returns what it found."""
    script = Path(__file__).with_name("hf_optax_driving.py")
    done = drivers.run(script, folder, *words, imports=["transformers.trainer", "optax"])
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.parametrize("before", [5, 30])
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_twenty_updates_in_optax_and_back_through_two_saves(kind: str, before: int, tmp_path: Path) -> None:
    """At b103f67 GPT-2's two groups were one chain without a mask, which `optax.adamw(mask=...)` couldn't restore."""
    result = driven(tmp_path, kind, "0.05", str(before))
    assert all(result["groups"])
    assert ("mask=mask" in result["lines"]) == (kind == "gpt2")
    # GPT-2's is held to a bound from its own movement: after 30 updates some weights are where Optax rounds most.
    assert result["of_bound"] <= 1 if kind == "gpt2" else result["optax"] <= IN_OPTAX, result["optax"]
    assert result["saved"] == [f"checkpoint-{before + more}" for more in (25, 30)]
    (losses, rates), (meant, due) = np.transpose(result["log"]), np.transpose(result["expected"])
    assert len(losses) == 10
    np.testing.assert_allclose(rates, due, rtol=1e-12)
    np.testing.assert_allclose(losses, meant, rtol=1e-5)
    # Keys' bias has no effect, as the softmax takes no notice of it: its gradients are rounding, which AdamW makes
    # steps of. That is seen, not taken for granted.
    without_effect = {name for name in result["weights"] if name.endswith(" of keys")}
    assert len(without_effect) == (2 if kind == "gpt2" else 0)
    for name in without_effect:
        queries = result["grads"][name.replace(" of keys", " of queries")]
        assert result["grads"][name] <= NOTHING * max(
            queries, result["grads"][name.replace("keys", "values")]
        )
    assert {n: x for n, x in result["weights"].items() if x > BACK and n not in without_effect} == {}


@pytest.mark.parametrize("rate", ["0.05", "0.01"])
def test_what_optax_and_pytorch_are_apart_is_their_own_rounding(rate: str, tmp_path: Path) -> None:
    """Optax makes 1 - beta2^t in float32: at a rate of 0.01 that is 1.5e-5 of the way that a weight near 1 goes."""
    result = driven(tmp_path, "gpt2", rate)
    assert result["as_by_hand"], "where statekit has no part, Optax ends elsewhere"
    assert result["of_bound"] <= 1, result["of_bound"]
