"""Recordings of the originals, driven by statekit.jax as a user drives a transformation."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.jax
jax = pytest.importorskip("jax")

# Imported only where JAX is.
import jax.numpy as jnp
import optax

import statekit.jax as sj
from goldens import GOLDEN
from replaying import present
from statekit.arrays.backend import Backend, backend
from statekit.conversion.open_state import open_state
from statekit.errors import UsageError
from statekit.jax.from_checkpoint import spec_of
from statekit.jax.leaves import leaves_of
from statekit.jax.states import State
from statekit.jax.transformation import built, slots_of, state_of
from statekit.optim.run import Live, Move
from statekit.optim.steps import Execution
from statekit.state.train_state import TrainState
from statekit.verify.recording import open_recording
from statekit.verify.replay import Subject, replay

QUICK = present(
    "t5x/momentum_f32",
    "scaled_adam/zipformer2025_basic",
    "mxnet_lans/fused_trainer",
    "keras/lamb_default",
    "torch_adafactor/adamw_fused_named",
)
EVERY = present(
    "t5x/default_heuristics", "t5x/factor_map_rank34", "t5x/noscale_wd_noclip", "t5x/skip_nan",
    "scaled_adam/gptsovits_basic", "scaled_adam/gptsovits_clipping", "scaled_adam/zipformer202305_basic",
    "scaled_adam/zipformer202407_clipping", "scaled_adam/pt7_two_groups_eden",
    "mxnet_lans/fused_bounds_clip_rescale", "mxnet_lans/unfused_trainer", "mxnet_lans/fused_fp16_multi_precision",
    "optax_adafactor/lamb_pytree_noocdbt", "keras/adafactor_default", "keras/adamw_ema_schedule_clip",
    "hf_adafactor/relstep_warmup_scale", "mesh_tf/adafactor_default_min128", "mesh_tf/gptneo_adam_cosine_clip",
    "t2t/late_default_ref", "t2t/early157_default_beta1",
)  # fmt: skip
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in EVERY)]


def mover(xp: Backend, state: TrainState, execution: Execution = "compiled") -> Move:
    """Steps by transformations, one for each group, compiled as a user compiles them: once, by a schedule of rates."""
    rules = [spec_of(state, group, None) for group in state.optimizer.groups]
    steps = [jax.jit(_step(spec)) for spec in rules]

    def move(live: Live, grads: Any, rates: Any) -> Live:
        params, slots, shared = dict(live.params), dict(live.slots), []
        by_group = rates if isinstance(rates, tuple) else (rates,) * len(rules)
        for i, (group, spec) in enumerate(zip(state.optimizer.groups, rules, strict=True)):
            params_here = {path: params[path] for path in group.paths}
            leaves = leaves_of(params_here)
            slots_here = {path: slots[path] for path in group.paths}
            before = state_of(spec.schema, leaves, jnp.int32(live.updates), slots_here, live.shared[i])
            given = {
                path: grads[path] if path in grads else jnp.zeros_like(p) for path, p in params_here.items()
            }
            after, own_state = steps[i](params_here, before, given, rate=by_group[i])
            moved, whole = slots_of(spec.schema, leaves, own_state)
            params.update(after)
            slots.update(moved)
            shared.append(whole)
        return Live(params, slots, tuple(shared), live.updates + 1, live.behind)

    return move


def _step(spec: Any) -> Any:
    def step(params: Any, state: State, grads: Any, rate: Any) -> Any:
        updates, state = built(replace(spec, rate=lambda count: rate)).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize("case", CASES)
def test_every_update_stays_within_the_bound(case: str) -> None:
    with open_recording(Path(GOLDEN / case)) as recording:
        result = replay(Subject(recording, "init"), backend("jax"), make=mover)
    outside = [
        (row.step, row.path, row.tensor, row.example)
        for one in result.judged
        for row in one.rows
        if row.outside
    ]
    assert not result.decoded and result.judged and outside == []


def test_a_count_that_is_off_is_noticed() -> None:
    def late(xp: Backend, state: TrainState, execution: Execution = "compiled") -> Move:
        right = mover(xp, state, execution)
        return lambda live, grads, rates: right(replace(live, updates=live.updates + 1), grads, rates)

    with open_recording(Path(GOLDEN / "t5x" / "momentum_f32")) as recording:
        result = replay(Subject(recording, "init"), backend("jax"), make=late)
    assert any(judged.outside for judged in result.judged)


def test_an_override_that_decides_which_slots_there_are_is_refused_with_a_way_out() -> None:
    with pytest.raises(
        UsageError, match=r"which slots there are @ factored(.|\n)*begin anew: statekit.jax.adafactor"
    ):
        sj.load_optimizer(GOLDEN / "t5x" / "momentum_f32" / "checkpoint", {}, factored=False)


def test_the_page_goes_on_in_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"<!-- run jax -->\n```python\n(.*?)```", page, re.DOTALL)
    case = GOLDEN / "t5x" / "momentum_f32"
    shutil.copytree(case / "checkpoint" / "checkpoint_4", tmp_path / "t5x-ckpt" / "checkpoint_4")
    monkeypatch.chdir(tmp_path)
    with open_state(tmp_path / "t5x-ckpt") as opened:
        shapes = {path: jax.ShapeDtypeStruct(t.shape, t.dtype) for path, t in opened.state.params.items()}
        done = opened.state.counts.updates
    names: dict[str, Any] = {"params": shapes}
    exec(compile(text, "optimizers.md", "exec"), names)
    assert int(names["state"].count) == done + 1
