from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.jax
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import statekit.jax as sj  # noqa: E402
from statekit.errors import UnknownRuleError, UsageError  # noqa: E402

OPTIMIZERS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (sj.adafactor, {"min_dim_size_to_factor": 4, "beta1": 0.9}),
    (sj.adafactor, {"variant": "optax", "min_dim_size_to_factor": 4}),
    (sj.scaled_adam, {"clipping_scale": 2.0, "clipping_update_period": 2}),
    (sj.lans, {"wd": 0.01}),
    (sj.lamb, {"weight_decay_rate": 0.01}),
    (sj.adamw, {"amsgrad": True}),
]
every = pytest.mark.parametrize(
    ("make", "options"), OPTIMIZERS, ids=[f"{make.__name__}-{len(o)}" for make, o in OPTIMIZERS]
)


def params() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    return {
        "a": {"kernel": normal(8, 6), "bias": normal(6)},
        "b": {"kernel": normal(8, 6)},
        "scale": normal(),
    }


def grads(of: Any, step: int = 0) -> Any:
    return jax.tree.map(lambda p: jnp.cos(p + step) * 0.1, of)


def run(transformation: Any, start: Any, steps: int = 3) -> tuple[Any, Any]:
    @jax.jit  # type: ignore[untyped-decorator]
    def one(moved: Any, state: Any, step: Any) -> Any:
        updates, state = transformation.update(grads(start, step), state, moved)
        return optax.apply_updates(moved, updates), state

    moved, state = start, transformation.init(start)
    for step in range(steps):
        moved, state = one(moved, state, step)
    return moved, state


def close(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-5, atol=1e-6)


@every
def test_scan_and_jit_do_what_a_loop_does(make: Callable[..., Any], options: dict[str, Any]) -> None:
    rule, start = make(1e-2, **options), params()

    def step(carry: Any, i: Any) -> tuple[Any, None]:
        moved, state = carry
        updates, state = rule.update(grads(start, i), state, moved)
        return (optax.apply_updates(moved, updates), state), None

    (moved, state), _ = jax.jit(lambda: jax.lax.scan(step, (start, rule.init(start)), jnp.arange(3.0)))()
    close((moved, state), run(rule, start))
    assert int(state.count) == 3


@every
def test_states_survive_what_optax_wraps_them_in(make: Callable[..., Any], options: dict[str, Any]) -> None:
    plain, start = make(1e-2, **options), params()
    mask = {"a": {"kernel": True, "bias": False}, "b": {"kernel": True}, "scale": True}
    alone, _ = run(plain, start)
    static = [name for name, value in options.items() if isinstance(value, int)]
    close(
        run(optax.inject_hyperparams(make, static_args=static)(learning_rate=1e-2, **options), start)[0],
        alone,
    )
    close(run(optax.chain(optax.identity(), plain), start)[0], alone)
    whole = optax.partition({"all": plain}, jax.tree.map(lambda _: "all", start))
    close(run(whole, start)[0], alone)
    _, state = run(optax.masked(plain, mask), start)
    assert isinstance(jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.MaskedNode))[0], jax.Array)
    steps = optax.MultiSteps(plain, 2)
    run(steps.gradient_transformation(), start, 4)
    doubled = jax.tree.map(lambda leaf: leaf * 2, plain.init(start))
    assert jax.tree.structure(doubled) == jax.tree.structure(plain.init(start))
    marked = optax.tree_utils.tree_map_params(plain, lambda leaf: leaf, plain.init(start))
    assert jax.tree.structure(marked) == jax.tree.structure(plain.init(start))


@every
def test_orbax_saves_and_restores_states(
    make: Callable[..., Any], options: dict[str, Any], tmp_path: Path
) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    rule, start = make(1e-2, **options), params()
    _, state = run(rule, start)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        close(saver.restore(tmp_path / "state", rule.init(start)), state)


def test_what_decides_shapes_stays_a_number() -> None:
    with pytest.raises(UsageError, match="static_args"):
        optax.inject_hyperparams(sj.adafactor)(learning_rate=0.1, min_dim_size_to_factor=4).init(params())
    kept = optax.inject_hyperparams(sj.adafactor, static_args=("min_dim_size_to_factor",))
    run(kept(learning_rate=0.1, min_dim_size_to_factor=4, clipping_threshold=1.0, decay_rate=0.8), params())


@every
def test_hyperparameters_may_be_arrays(make: Callable[..., Any], options: dict[str, Any]) -> None:
    numbers = {k: v for k, v in options.items() if isinstance(v, float)}
    arrays = {**options, **{name: jnp.float32(value) for name, value in numbers.items()}}
    close(run(make(jnp.float32(1e-2), **arrays), params())[0], run(make(1e-2, **options), params())[0])


def test_a_learning_rate_is_never_assumed() -> None:
    rule = sj.lamb()
    state = rule.init(params())
    with pytest.raises(UnknownRuleError, match="learning rate"):
        rule.update(grads(params()), state, params())
    scheduled, _ = run(sj.lamb(lambda count: jnp.where(count < 3, 1e-2, 0.0)), params())
    close(scheduled, run(sj.lamb(1e-2), params())[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_updates_lead_exactly_to_what_the_rule_makes(dtype: str) -> None:
    start = jax.tree.map(lambda p: p.astype(dtype), params())
    rule = sj.adafactor(0.3, min_dim_size_to_factor=4)
    updates, _ = rule.update(grads(start), rule.init(start), start)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
    from statekit.jax.transformation import difference

    rng = np.random.default_rng(1)
    old, new = (
        jnp.asarray(rng.standard_normal(10_000) * 10.0 ** rng.integers(-6, 6, 10_000), dtype) for _ in "ab"
    )
    reached = jnp.asarray(old + difference(new, old)).astype(dtype)
    missed = np.abs(np.asarray(reached, np.float64) - np.asarray(new, np.float64))
    unit = np.spacing(np.maximum(np.abs(np.asarray(old, np.float32)), np.abs(np.asarray(new, np.float32))))
    assert np.all(missed <= unit)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P
import statekit.jax as sj
mesh = jax.make_mesh((2, 2, 2), ("b", "r", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
rng = np.random.default_rng(0)
plain = {"s": jnp.asarray(rng.standard_normal((4, 8, 6), np.float32)), "v": jnp.ones(8)}
specs = {"s": P("b", "r", "c"), "v": P("r")}
there = jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), plain, specs)
rules = [("s", ["BATCH", "ROW", "COLUMN"]), (".*", "HEURISTIC")]
for rule in (sj.adafactor(0.1, factor_map=rules, beta1=0.9), sj.scaled_adam(0.1, clipping_scale=2.0), sj.lans(0.1),
             sj.lamb(0.1), sj.adamw(0.1)):
    def step(p, s):
        u, s = rule.update(jax.tree.map(jnp.cos, p), s, p)
        return optax.apply_updates(p, u), s
    want, got = (plain, rule.init(plain)), (there, rule.init(there))
    wrapped = optax.chain(optax.identity(), rule)
    asked = sj.state_shardings(wrapped.init, there)[1]
    for _ in range(3):
        laid = (jax.tree.map(lambda x: x.sharding, there), asked)
        want, got = jax.jit(step)(*want), jax.jit(step, out_shardings=laid)(*got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    if hasattr(got[1], "v_row"):
        fresh = rule.init(there)
        assert fresh.v_row["s"].sharding.spec == P("b", "r") == got[1].v_row["s"].sharding.spec
        assert fresh.v_col["s"].sharding.spec == P("b", "c") and fresh.m["s"].sharding.spec == P("b", "r", "c")
print("equal")
"""


def test_sharded_parameters_move_as_whole_ones() -> None:
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
