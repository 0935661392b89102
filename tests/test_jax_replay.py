"""Recordings of the originals, driven by statekit.jax: each update of the jitted transformation by its bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

from goldens import GOLDEN
from replaying import present
from statekit.backends import Backend, Value, backend
from statekit.jax.leaves import leaves_of
from statekit.jax.loading import _loaded, _told
from statekit.jax.transformation import built
from statekit.optim.run import Live, Move, Rates, store
from statekit.optim.steps import Arrays, Execution
from statekit.state import TrainState
from statekit.verify.recording import open_recording
from statekit.verify.replay import Replay, Subject, replay

pytestmark = pytest.mark.jax
SAMPLE = present(
    "t5x/momentum_f32", "t5x/scanned_logical_rules", "scaled_adam/zipformer202407_clipping",
    "mxnet_lans/fused_bounds_clip_rescale", "optax_adafactor/lamb_pytree_noocdbt",
    "optax_adafactor/adamw_flax_msgpack", "torch_formats/adamw_legacy", "hf_adafactor/trainer_linear_wd",
)  # fmt: skip
REST = sorted(
    {f"{meta.parent.parent.name}/{meta.parent.name}" for meta in GOLDEN.glob("*/*/meta.json")} - {*SAMPLE}
)


def by_transformation(xp: Backend, state: TrainState, execution: Execution) -> Move:
    """Returns the step of the transformations that go on with a state, jitted, as a training loop calls them."""
    groups = state.optimizer.groups

    def update(told: Any, params: Any, grads: Any, held: Any, rate: Any) -> Any:
        updates, after = built(replace(told, rate=rate)).update(grads, held, params)
        return optax.apply_updates(params, updates), after

    compiled = [jax.jit(partial(update, _told(state, group, None))) for group in groups]

    def move(live: Live, grads: Arrays, rates: Rates) -> Live:
        now = store(xp, live, state)
        by_group = rates if isinstance(rates, tuple) else (rates,) * len(groups)
        params, slots, shared = dict(live.params), dict(live.slots), []
        for i, (group, rate) in enumerate(zip(groups, by_group, strict=True)):
            own = {path: params[path] for path in group.paths}
            held = _loaded(
                _told(now, now.optimizer.groups[i], None), now, now.optimizer.groups[i], leaves_of(own)
            )
            moved, after = compiled[i](own, {path: grads[path] for path in own}, held, rate)
            params |= moved
            for path in own:
                slots[path] = {name: _at(after, name, path) for name in live.slots[path]}
            shared.append({name: getattr(after, name) for name in live.shared[i]})
        return Live(params, slots, tuple(shared), live.updates + 1)

    return move


def _at(state: Any, slot: str, path: str) -> Value:
    tree: Mapping[str, Any] = getattr(state, slot)
    return tree[path]


def driven(folder: Path, **changes: Any) -> Replay | None:
    """Judges a recording from its beginning; None where a parameter lacks a gradient: Optax knows no such thing."""
    with open_recording(folder) as recording:
        subject = Subject(recording, "init", changes=changes or None)
        first = recording.gradients(recording.first + 1)
        if any(path not in first for group in subject.state().optimizer.groups for path in group.paths):
            return None
        compiled = tuple(t for t in recording.trajectories if t.execution == "compiled")
        result = replay(subject, backend("jax"), make=by_transformation)
        kept = tuple(one for one in result.judged if one.trajectory in compiled)
        return replace(result, judged=kept or result.judged)


@pytest.mark.parametrize("case", SAMPLE)
def test_every_update_lies_in_the_bound(case: str) -> None:
    result = driven(GOLDEN / case)
    assert result is not None and result.passed


@pytest.mark.slow
@pytest.mark.parametrize("case", REST)
def test_every_other_recording_lies_in_the_bound(case: str) -> None:
    try:
        result = driven(GOLDEN / case)
    except LookupError:  # not a recording that can be stepped
        return
    assert result is None or result.passed


@pytest.mark.parametrize("changes", [{"beta1": 0.8}, {"epsilon2": 2e-3}, {"decay_rate": 0.81}])
def test_another_rule_leaves_the_bound(changes: dict[str, Any]) -> None:
    result = driven(GOLDEN / "t5x" / "momentum_f32", **changes)
    assert result is not None and not result.passed
