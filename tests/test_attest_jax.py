"""Attesting a live run in JAX: sharded arrays on eight devices, restored by Orbax, rightly and wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drivers
import numpy as np
import pytest

pytest.importorskip("jax")

from statekit.arrays.intervals import IntervalBackend
from statekit.attestation.update import Gradient, _interval
from statekit.errors import UnknownRuleError, UsageError
from statekit.jax import attest, attested_step, live
from statekit.state.comparison import is_zero
from statekit.tensors.distance import distance
from statekit.tensors.tensor import in_memory
from statekit.tensors.views import Squeezed

pytestmark = pytest.mark.jax

FAULTS = {
    "unused": "optimizer-empty",
    "weights": "parameter-differs",
    "exchanged": "parameter-differs",
    "moments zero": "slot-zero",
    "moments of one parameter zero": "slot-zero",
    "moments exchanged": "slot-of-another-parameter",
    "moments negated": "slot-differs",
    "moments doubled": "slot-differs",
    "moments rounded": "slot-differs",
    "moments not finite": "slot-differs",
    "moments one bit apart": "slot-differs",
    "moments reversed": "slot-differs",
    "one device's moments new": "slot-differs",
    "count lost": "step",
    "count one on": "step",
    "weights new": "parameter-differs",
    "weights cast": "parameter-rounded",
    "weights rounded": "parameter-differs",
    "weights one bit apart": "parameter-differs",
    "weights exchanged": "parameter-differs",
    "a weight missing": "broken",
}
"""What goes wrong, and what is found then, besides what a cast leaves."""
WAITING = [
    "Gradients of an update are being accumulated (acc_grads); where they have no place, the run loses them.",
    "optax.MultiSteps takes the mean of gradients (use_grad_mean), as it usually does: its state doesn't say it.",
]
STEPS = {
    **{kind: [3] for kind in ("adamw", "adafactor", "statekit", "several", "injected", "skipping")},
    "waiting": [3, *WAITING],
    "powers_cached": ["update-differs"],
    "gradients_changed": ["update-differs"],
    "state_elsewhere": ["update-differs"],
    "another_rate": ["update-differs"],
    "epsilon_moved": ["update-differs"],
    "count_left": ["step"],
}
"""Of updates: findings, how many parameters were stepped, and what is said of it."""


def driven(work: Path, *which: str) -> Any:
    script = Path(__file__).with_name("attest_jax_driving.py")
    done = drivers.run(script, work, *which, imports=["orbax.checkpoint", "optax", "statekit.jax"])
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((work / "result.json").read_text())


@pytest.mark.parametrize("which", ["sample", pytest.param("all", marks=pytest.mark.slow)])
def test_runs_with_optax_and_orbax_are_attested(which: str, tmp_path: Path) -> None:
    result = driven(tmp_path, which)
    steps = result.pop("steps")
    assert steps == (STEPS if which == "all" else {name: STEPS[name] for name in steps}) != {}
    assert {*result} == {"adamw", "adafactor", *["statekit"] * (which == "all")}
    assert result["adamw"].pop("reset") == ["schedule"]
    for kind, names in result.items():
        assert names.pop("honest") == []
        for cast in ("cast", "moments cast"):
            assert "slot-rounded" in names.pop(cast), kind  # Adafactor's state shows its momentum's dtype too
        assert {fault: each for fault, (each,) in names.items()} == FAULTS, kind


class _Rows:
    """What JAX shows of an array of which this process has the rows 0 and 2, the latter on two devices."""

    is_fully_addressable = is_fully_replicated = False

    def __init__(self, values: Any) -> None:
        self.shape, self.dtype = values.shape, values.dtype
        cuts = [(slice(i, i + 1), slice(None)) for i in (0, 2, 2)]
        self.addressable_shards = [SimpleNamespace(index=cut, data=values[cut]) for cut in cuts]


def test_parts_that_are_apart_are_compared_and_nothing_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "jax", SimpleNamespace(Array=_Rows, process_index=lambda: 1))
    right = np.arange(1, 17, dtype=np.float32).reshape(4, 4)
    values = right.copy()
    values[[1, 3]] = -1  # another process has these
    array = live.LiveArray(_Rows(values), "w")
    assert array.parts == ((slice(0, 1), slice(0, 4)), (slice(2, 3), slice(0, 4)))
    apart = distance(in_memory(right), array, array.parts)
    assert (apart.size, apart.unequal) == (8, 0)
    values[2, 3] = 0
    apart = distance(in_memory(right), array, array.parts)
    assert (apart.unequal, apart.first) == (1, (2, 3))
    values[[0, 2]] = 0
    assert is_zero(array)
    assert is_zero(Squeezed(array, (4, 1, 4)))
    with pytest.raises(UsageError, match="process 1"):
        array.read()


def test_a_step_is_told_by_name_what_it_needs(tmp_path: Path) -> None:
    optax, orbax = pytest.importorskip("optax"), pytest.importorskip("orbax.checkpoint")
    params = {"w": np.ones((4, 2), np.float32)}
    made = {"lion": optax.lion(0.1), "clipped": optax.chain(optax.clip(1.0), optax.adamw(0.1))}
    for kind, optimizer in made.items():
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / kind, {"params": params, "opt_state": optimizer.init(params)})
    state = made["clipped"].init(params)
    with pytest.raises(UsageError, match="learning_rate"), attested_step(params, state, tmp_path / "clipped"):
        pass
    said: dict[str, Any] = {"learning_rate": 0.1, "hparams": {"weight_decay_rate": 1e-4}}
    with (
        pytest.raises(UnknownRuleError, match="clipvalue"),
        attested_step(params, state, tmp_path / "clipped", **said),
    ):
        pass
    said["hparams"] = {"clipvalue": 1.0, "global_norm_clip_threshold": None, "weight_decay_rate": 1e-4}
    with (
        pytest.raises(UsageError, match="isn't like the parameters"),
        attested_step(params, state, tmp_path / "clipped", **said) as step,
    ):
        step.check({"w": params["w"], "b": params["w"]}, params, state)
    with (
        pytest.raises(UsageError, match="without an update"),
        attested_step(params, state, tmp_path / "clipped", **said) as step,
    ):
        pass
    with attested_step(params, made["lion"].init(params), tmp_path / "lion") as step:
        step.check(params, params, state)
    assert step.result is not None
    assert (step.result.passed, step.result.stepped, step.result.tensors) == (True, 0, 2)
    assert "statekit can't step this optimizer" in str(step.result)


def test_keys_are_compared_by_name_and_those_that_are_not_are_said(tmp_path: Path) -> None:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    orbax, serialization = pytest.importorskip("orbax.checkpoint"), pytest.importorskip("flax.serialization")
    params = {"w": np.ones((4, 2), np.float32)}
    state = optax.adamw(0.1).init(params)
    keys = {
        "rng": jax.random.key(3),
        "rngs": {"dropout": jax.random.PRNGKey(4), "params": jax.random.PRNGKey(5)},
    }
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", {"params": params, "opt_state": state, **keys})
    raw = {"rng": jax.random.PRNGKey(3), "rngs": keys["rngs"]}
    (tmp_path / "checkpoint_0").write_bytes(
        serialization.to_bytes({"params": params, "opt_state": state, **raw})
    )
    for path in (tmp_path / "orbax", tmp_path / "checkpoint_0"):
        for same in (keys, raw):
            result = attest(params, state, path, generators=same, strict=True)
            assert not [line for line in result.unchecked if "random" in line], str(result)
        drawn = {"rng": jax.random.split(keys["rng"])[0], "rngs": {"dropout": keys["rngs"]["params"]}}
        (finding,) = attest(params, state, path, generators=drawn).findings
        assert (finding.name, finding.where) == ("random", ("rng", "rngs/dropout"))
        said = attest(params, state, path, generators={"noise": keys["rng"]}).unchecked
        assert [line for line in said if line.startswith("random: ")] == [
            f"random: noise: the checkpoint ({'orbax' if path.name == 'orbax' else 'flax'}) keeps no such key",
            "random: extra/optax/tree/rng: no live key was given for it",
            "random: extra/optax/tree/rngs/dropout: no live key was given for it",
            "random: extra/optax/tree/rngs/params: no live key was given for it",
        ]
        assert [line for line in attest(params, state, path).unchecked if line.startswith("random")]
    with pytest.raises(UsageError, match="JAX has no generators of its own"):
        attest(params, state, tmp_path / "orbax", generators=True)


def test_a_gradient_may_be_used_before_it_is_rounded_where_it_is_compiled_with_the_update() -> None:
    third = np.asarray([1 / 3], np.float32)
    for fused in (True, False):
        bound = _interval(IntervalBackend(True), Gradient(third, fused=fused))
        assert (
            bool(bound.encloses(np.asarray([1 / 3]))[0]) is fused
        )  # what a factor that follows is applied to
        assert not bound.encloses(np.asarray([1 / 3 * (1 + 2**-21)]))[0]
