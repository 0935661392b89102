from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import drivers
import numpy as np
import pytest

pytestmark = pytest.mark.jax
jax = pytest.importorskip("jax")

# Imported only where JAX is.
import jax.numpy as jnp
import optax
from jax_judging import Moment, faults, in_float32, spec_by

import statekit.jax as sj
from statekit.errors import UnknownRuleError, UsageError
from statekit.jax import batches

OPTIMIZERS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (sj.adafactor, {"min_dim_size_to_factor": 4, "beta1": 0.9}),
    (sj.adafactor, {"variant": "optax", "min_dim_size_to_factor": 4}),
    (sj.scaled_adam, {"clipping_scale": 2.0, "clipping_update_period": 2}),
    (sj.lans, {"wd": 0.01}),
    (sj.lamb, {"weight_decay_rate": 0.01}),
    (sj.adamw, {"amsgrad": True}),
]
every = pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(
            m, o, id=f"{m.__name__}-{len(o)}", marks=[] if m is sj.adamw or "beta1" in o else pytest.mark.slow
        )
        for m, o in OPTIMIZERS
    ],
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


RATE = 1e-2


def slopes(of: Any, steps: int = 3) -> list[Any]:
    def slope(param: Any, step: int) -> Any:
        return jnp.asarray(np.cos(np.asarray(param, np.float32) + step) * np.float32(0.1), param.dtype)

    return [jax.tree.map(lambda p, step=step: slope(p, step), of) for step in range(steps)]


@cache
def compiled(transformation: Any) -> Callable[[Any, Any, Any], Moment]:
    def one(params: Any, state: Any, grads: Any) -> Moment:
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    moved: Callable[[Any, Any, Any], Moment] = jax.jit(one)
    return moved


def trail(transformation: Any, start: Any, steps: int = 3) -> list[Moment]:
    """Returns parameters and state before the first update, and after every one."""

    moved, moments = compiled(transformation), [(start, transformation.init(start))]
    for grads in slopes(start, steps):
        moments.append(moved(*moments[-1], grads))
    return moments


def require_within(make: Callable[..., Any], options: dict[str, Any], moments: list[Moment]) -> None:
    assert faults(spec_by(make, options), RATE, moments, slopes(moments[0][0], len(moments) - 1)) == []


@every
def test_updates_stay_within_a_bound_that_a_wrong_count_or_a_part_that_stays_leaves(
    make: Callable[..., Any], options: dict[str, Any]
) -> None:
    rule, spec = make(RATE, **options), spec_by(make, options)
    moments = trail(rule, params())
    require_within(make, options, moments)
    (*_, before, after), grads = moments, slopes(params())[-1:]
    skipped = (after[0], after[1]._replace(count=after[1].count + 1))
    assert faults(spec, RATE, [before, skipped], grads)
    late = before[1]._replace(count=before[1].count + 1)
    moved, state = compiled(rule)(before[0], late, grads[0])
    reached = (moved, state._replace(count=after[1].count))
    assert faults(spec, RATE, [before, reached], grads)
    kernel = after[0]["a"]["kernel"].at[:4].set(before[0]["a"]["kernel"][:4])
    half = {**after[0], "a": {**after[0]["a"], "kernel": kernel}}
    assert faults(spec, RATE, [before, (half, after[1])], grads)


@every
def test_scan_does_what_the_rule_says(make: Callable[..., Any], options: dict[str, Any]) -> None:
    rule, start = make(RATE, **options), params()

    def step(carry: Any, grads: Any) -> tuple[Any, Any]:
        moved, state = carry
        updates, state = rule.update(grads, state, moved)
        after = (optax.apply_updates(moved, updates), state)
        return after, after

    fresh = (start, rule.init(start))
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *slopes(start))
    _, after = jax.jit(lambda: jax.lax.scan(step, fresh, stacked))()
    require_within(make, options, [fresh, *(jax.tree.map(lambda x, i=i: x[i], after) for i in range(3))])


@every
def test_states_survive_what_optax_wraps_them_in(make: Callable[..., Any], options: dict[str, Any]) -> None:
    plain, start = make(RATE, **options), params()
    mask = {"a": {"kernel": True, "bias": False}, "b": {"kernel": True}, "scale": True}
    static = [name for name, value in options.items() if isinstance(value, int)]
    injected = optax.inject_hyperparams(make, static_args=static)(learning_rate=RATE, **options)
    require_within(make, in_float32(options), trail(injected, start))
    require_within(make, options, trail(optax.chain(optax.identity(), plain), start))
    whole = optax.partition({"all": plain}, jax.tree.map(lambda _: "all", start))
    require_within(make, options, trail(whole, start))
    _, state = trail(optax.masked(plain, mask), start)[-1]
    assert isinstance(jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.MaskedNode))[0], jax.Array)
    steps = optax.MultiSteps(plain, 2)
    trail(steps.gradient_transformation(), start, 4)
    doubled = jax.tree.map(lambda leaf: leaf * 2, plain.init(start))
    assert jax.tree.structure(doubled) == jax.tree.structure(plain.init(start))
    marked = optax.tree_utils.tree_map_params(plain, lambda leaf: leaf, plain.init(start))
    assert jax.tree.structure(marked) == jax.tree.structure(plain.init(start))


def require_equal(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@every
def test_orbax_saves_and_restores_states(
    make: Callable[..., Any], options: dict[str, Any], tmp_path: Path
) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    rule, start = make(RATE, **options), params()
    _, state = trail(rule, start)[-1]
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        require_equal(saver.restore(tmp_path / "state", rule.init(start)), state)


def test_what_decides_shapes_stays_a_number() -> None:
    with pytest.raises(UsageError, match="static_args"):
        optax.inject_hyperparams(sj.adafactor)(learning_rate=0.1, min_dim_size_to_factor=4).init(params())
    kept = optax.inject_hyperparams(sj.adafactor, static_args=("min_dim_size_to_factor",))
    trail(kept(learning_rate=0.1, min_dim_size_to_factor=4, clipping_threshold=1.0, decay_rate=0.8), params())


@every
def test_hyperparameters_may_be_arrays(make: Callable[..., Any], options: dict[str, Any]) -> None:
    numbers = {k: v for k, v in options.items() if isinstance(v, float)}
    arrays = {**options, **{name: jnp.float32(value) for name, value in numbers.items()}}
    require_within(make, in_float32(options), trail(make(jnp.float32(RATE), **arrays), params()))


def test_gradients_that_are_missing_or_would_be_broadcast_are_refused_by_name() -> None:
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones(4), "c": jnp.ones(4)}
    optimizer = sj.adamw(1e-2)
    grads = {"a": jnp.ones(4), "b": None, "c": jnp.ones(4)}
    with pytest.raises(UsageError, match=r"\(3, 4\), its gradient \(4,\) @ a(.|\n)*no gradient.*@ b"):
        optimizer.update(grads, optimizer.init(params), params)


def test_a_learning_rate_is_never_assumed() -> None:
    rule = sj.lamb()
    state = rule.init(params())
    with pytest.raises(UnknownRuleError, match="learning rate"):
        rule.update(slopes(params())[0], state, params())
    require_within(sj.lamb, {}, trail(sj.lamb(lambda count: jnp.where(count < 3, RATE, 0.0)), params()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_updates_lead_exactly_to_what_the_rule_makes(dtype: str) -> None:
    start = jax.tree.map(lambda p: p.astype(dtype), params())
    rule = sj.adafactor(0.3, min_dim_size_to_factor=4)
    updates, _ = rule.update(slopes(start)[0], rule.init(start), start)
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


def test_sharded_parameters_move_within_the_bound() -> None:
    script = Path(__file__).with_name("jax_sharding.py")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = drivers.run(script, imports=["optax", "statekit.jax"], **flags)
    assert done.stdout.strip() == "5 within the bound", done.stderr[-3000:]


LARGE = (260, 256)
"""The shape of a parameter that isn't stacked with others."""


def _params(count: int, shape: tuple[int, int] = LARGE) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns parameters and gradients, among which are what a product with 1 could lose."""
    random = np.random.default_rng(0)
    params = {f"layer_{i}": random.normal(size=shape).astype(np.float32) for i in range(count)}
    grads = {name: random.normal(size=shape).astype(np.float32) for name in params}
    for name, value in zip(grads, (-0.0, np.nan, 1e-42, np.inf), strict=False):
        grads[name][3, 5] = value
    return params, grads


@pytest.mark.parametrize("make", [sj.lamb, sj.lans])
def test_what_large_parameters_need_is_not_there_for_all_at_once(make: Callable[..., Any]) -> None:
    def room(count: int) -> int:
        params, grads = _params(count)
        transformation = make(RATE)
        lowered = jax.jit(transformation.update).lower(grads, transformation.init(params), params)
        return int(lowered.compile().memory_analysis().temp_size_in_bytes)

    assert room(6) < room(2) + np.prod(LARGE) * 4


@pytest.mark.parametrize("make", [sj.lamb, sj.lans])
def test_large_parameters_in_turn_move_as_each_alone(make: Callable[..., Any]) -> None:
    params, grads = _params(4)
    empty = {"empty": np.zeros((0, 3), np.float32)}
    transformation = make(RATE)
    update = jax.jit(transformation.update)
    together, _ = update({**empty, **grads}, transformation.init({**empty, **params}), {**empty, **params})
    for name, param in params.items():
        single = {name: param}
        alone, _ = update({name: grads[name]}, transformation.init(single), single)
        assert np.array_equal(together[name], alone[name], equal_nan=True)


def test_stacks_move_alike_one_after_the_other_and_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    params, grads = _params(4, (8, 8))
    moved = []
    for most in (2, 4):
        monkeypatch.setattr(batches, "PARTS", most)
        transformation = sj.adamw(RATE)
        moved.append(jax.jit(transformation.update)(grads, transformation.init(params), params)[0])
    for name in params:
        assert np.array_equal(moved[0][name], moved[1][name], equal_nan=True)
