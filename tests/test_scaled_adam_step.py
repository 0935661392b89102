"""ScaledAdam's one text: what its pieces do at the edges that the originals define, in every backend."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaying import COMPILING, marks
from statekit.arrays.backend import BACKEND_NAMES, Backend, backend
from statekit.arrays.intervals import UNIT, IntervalBackend
from statekit.arrays.numpy_backend import ORACLE
from statekit.arrays.promotion import promoted
from statekit.errors import StateError, UnknownRuleError
from statekit.optim import scaled_adam
from statekit.optim.run import initial, load, mover, store
from statekit.optim.scaled_adam_forms import corrected_updates
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import DTYPES, Array, in_memory

DEFAULTS: dict[str, Any] = dict(load_schema("scaled_adam").variants["zip2025"]["defaults"])
NEWEST, SEED = "zip2025", "gptsovits"


# The text is one: that a backend which compiles runs it too, test_conformance_steps.py shows in `make test`.
@pytest.fixture(
    params=[
        "float64",
        *(pytest.param(name, marks=marks(name, name in COMPILING)) for name in BACKEND_NAMES),
    ]
)
def xp(request: pytest.FixtureRequest) -> Backend:
    return ORACLE if request.param == "float64" else backend(request.param)


def state_of(
    params: Mapping[str, Array], variant: str = NEWEST, updates: int = 0, **changes: Any
) -> TrainState:
    group = Group(tuple(params), {**DEFAULTS, "size_update_period": 2, **changes})
    tensors = {path: in_memory(np.asarray(p), path) for path, p in params.items()}
    bare = TrainState(tensors, {}, Optimizer("scaled_adam", variant, (group,)), Counts(updates, updates))
    return initial(bare)


def run(xp: Backend, state: TrainState, *grads: Mapping[str, Array], lr: float = 0.04) -> TrainState:
    move, live = mover(xp, state), load(xp, state)
    for grad in grads:
        live = move(live, {path: xp.asarray(np.asarray(g)) for path, g in grad.items()}, lr)
    return store(xp, live, state)


def arrays(*shape: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)


def read(state: TrainState, path: str, slot: str = "") -> Array:
    return (state.slots[path][slot] if slot else state.params[path]).read()


def shared(state: TrainState, slot: str) -> Array:
    return state.optimizer.groups[0].slots[slot].read()


def test_slots_begin_at_zero_with_their_shapes() -> None:
    state = state_of({"w": np.ones((3, 4), np.float16), "b": np.ones((1, 1), np.float16)}, clipping_scale=2.0)
    shapes = {name: (t.shape, t.dtype.name) for name, t in state.slots["w"].items()}
    assert shapes == {
        "delta": ((3, 4), "float32"),
        "exp_avg_sq": ((3, 4), "float32"),
        "param_rms": ((1, 1), "float32"),
        "scale_exp_avg_sq": ((1, 1), "float32"),
        "scale_grads": ((2, 1, 1), "float32"),
    }
    assert set(state.slots["b"]) == {"delta", "exp_avg_sq"}
    assert np.isposinf(shared(state, "model_norm_threshold")) and shared(state, "num_clipped") == 0
    assert shared(state, "model_norms").shape == (100,)
    older = state_of({"w": np.ones((3, 4), np.float16)}, "pt7")
    assert {t.dtype.name for t in older.slots["w"].values()} == {"float16"}
    assert not older.optimizer.groups[0].slots


def test_the_first_update_by_hand(xp: Backend) -> None:
    p, g = arrays(4, 6)
    after = run(xp, state_of({"w": p}), {"w": g})
    wide = g.astype(np.float64)
    rms = math.sqrt(np.mean(p.astype(np.float64) ** 2))
    step = -0.04 * wide / (np.abs(wide) + 1e-8) * rms  # v / c2 is g^2
    np.testing.assert_allclose(read(after, "w", "delta"), 0.1 * step, rtol=2e-5)
    np.testing.assert_allclose(read(after, "w"), p + 0.1 * step, rtol=2e-5, atol=1e-7)
    assert read(after, "w", "param_rms").item() == pytest.approx(rms, rel=1e-6)
    np.testing.assert_allclose(
        read(after, "w", "scale_grads").ravel(), [np.sum(p.astype(np.float64) * wide), 0], rtol=1e-5
    )
    assert read(after, "w", "scale_exp_avg_sq").item() == 0


def test_the_rms_lags_between_refreshes(xp: Backend) -> None:
    p, g = arrays(5)
    first = run(xp, state_of({"w": p}, size_update_period=3), {"w": g})
    second = run(xp, first, {"w": g})
    third = run(xp, second, {"w": g})
    assert read(first, "w", "param_rms") == read(second, "w", "param_rms")
    fresh = math.sqrt(np.mean(read(second, "w").astype(np.float64) ** 2))
    assert read(third, "w", "param_rms").item() == pytest.approx(fresh, rel=1e-6)


@pytest.mark.parametrize(("variant", "limit"), [(SEED, True), (NEWEST, False)])
def test_when_a_scalar_is_clamped_is_the_generations(xp: Backend, variant: str, limit: bool) -> None:
    p = {"s": np.array(1.5, np.float32)}
    after = run(xp, state_of(p, variant, scalar_max=1.0), {"s": np.array(-3.0, np.float32)}, lr=0.5)
    assert (float(read(after, "s")) > 1.0) == limit
    assert float(read(after, "s")) == pytest.approx(1.0, abs=0.01)


def test_too_large_a_parameter_shrinks(xp: Backend) -> None:
    p, g = arrays(6)
    newest = run(
        xp, state_of({"w": p * 100}, param_max_rms=1.0, betas=(0.1, 0.98)), {"w": g}, {"w": g}, lr=1e-4
    )
    assert np.all(np.abs(read(newest, "w")) < 0.2 * np.abs(100 * p)), "it may shrink beyond the limit of -0.1"
    older = run(xp, state_of({"w": p * 100}, SEED, param_max_rms=1.0), {"w": g * 0}, {"w": g * 0})
    np.testing.assert_allclose(read(older, "w", "delta"), 0.1 * 100 * p * (-0.04 * 0.1 * 2), rtol=1e-5)


def test_too_small_a_parameter_is_not_shrunk(xp: Backend) -> None:
    small = run(xp, state_of({"w": np.zeros(4, np.float32)}), *[{"w": np.ones(4, np.float32)}] * 4)
    assert np.isfinite(read(small, "w")).all() and np.abs(read(small, "w")).max() < 1e-5
    assert np.abs(read(small, "w")).min() > 0


def test_a_missing_gradient_counts_as_zeros(xp: Backend) -> None:
    p, g = arrays(4)
    begin = state_of({"w": p, "s": np.ones(1, np.float32)}, size_update_period=4)
    moving = run(xp, begin, {"w": g, "s": np.ones(1, np.float32)})
    absent, zero = (run(xp, moving, grads) for grads in ({}, {"w": g * 0, "s": np.zeros(1, np.float32)}))
    for path in ("w", "s"):
        assert np.array_equal(read(absent, path), read(zero, path))
        np.testing.assert_allclose(read(absent, path, "delta"), 0.9 * read(moving, path, "delta"), rtol=1e-6)
        assert not np.array_equal(read(absent, path), read(moving, path))


def test_stopping_in_the_middle_changes_nothing(xp: Backend) -> None:
    p, _ = arrays(3, 4)
    grads = [{"w": arrays(3, 4, seed=i)[1]} for i in range(7)]
    begin = state_of({"w": p}, clipping_scale=1.1, clipping_update_period=2, size_update_period=3)
    whole, parts = run(xp, begin, *grads), run(xp, run(xp, begin, *grads[:4]), *grads[4:])
    assert whole.counts == parts.counts == Counts(7, 7)
    for name in whole.slots["w"]:
        assert np.array_equal(read(whole, "w", name), read(parts, "w", name))
    assert np.array_equal(read(whole, "w"), read(parts, "w"))
    for name in ("model_norms", "model_norm_threshold", "num_clipped"):
        assert np.array_equal(shared(whole, name), shared(parts, name))
    assert shared(whole, "num_clipped").dtype.kind == "i"


def test_a_permutation_of_parameters_changes_no_update(xp: Backend) -> None:
    shapes = {"a": (4, 6), "b": (3,), "c": (4, 6), "d": ()}
    params = {name: arrays(*shape, seed=i)[0] for i, (name, shape) in enumerate(shapes.items())}
    grads = {name: arrays(*shape, seed=i)[1] for i, (name, shape) in enumerate(shapes.items())}
    ends = []
    for order in (list(shapes), list(shapes)[::-1]):
        begin = state_of({n: params[n] for n in order}, clipping_scale=1.0, clipping_update_period=2)
        ends.append(run(xp, begin, *[{n: grads[n] for n in order}] * 4))
    for name in shapes:
        np.testing.assert_allclose(read(ends[0], name), read(ends[1], name), rtol=1e-6)


def norms(state: TrainState, xp: Backend, scales: list[float], variant: str = NEWEST) -> TrainState:
    return run(xp, state, *[{"w": np.full(4, scale, np.float32)} for scale in scales])


def test_the_threshold_is_a_multiple_of_the_median_norm(xp: Backend) -> None:
    begin = state_of(
        {"w": np.ones(4, np.float32)}, clipping_scale=2.0, clipping_update_period=4, param_min_rms=1e-3
    )
    before = norms(begin, xp, [9, 1, 2, 3])
    assert np.isposinf(shared(before, "model_norm_threshold"))
    after = norms(before, xp, [4])
    sizes = np.sort(shared(after, "model_norms"))
    assert float(shared(after, "model_norm_threshold")) == pytest.approx(2.0 * sizes[2], rel=1e-6)
    assert sizes[0] > 1.5, "the norm of the first update isn't kept"
    assert shared(after, "num_clipped") == 0
    clipped = norms(after, xp, [100])
    assert shared(clipped, "num_clipped") == 1
    assert read(clipped, "w", "scale_grads").ravel()[1] < 100


def test_early_estimates_look_at_the_largest_entries_and_are_doubled(xp: Backend) -> None:
    begin = state_of(
        {"w": np.ones(4, np.float32)}, "zip202407", clipping_scale=2.0, clipping_update_period=50
    )
    after = norms(begin, xp, [1.0 + 0.1 * i for i in range(11)], "zip202407")
    sizes = np.sort(shared(after, "model_norms"))[-10:]
    assert float(shared(after, "model_norm_threshold")) == pytest.approx(4.0 * sizes[4], rel=1e-6)
    seed = state_of({"w": np.ones(4, np.float32)}, SEED, clipping_scale=2.0, clipping_update_period=50)
    assert np.isposinf(shared(norms(seed, xp, [1.0] * 11, SEED), "model_norm_threshold"))


def test_norms_that_were_lost_throw_a_period_of_gradients_away(xp: Backend) -> None:
    """The trap for which model_norms must be carried: the median of a buffer of zeros is 0."""
    begin = state_of({"w": np.ones(4, np.float32)}, clipping_scale=2.0, clipping_update_period=8)
    lost = dataclasses.replace(begin, counts=Counts(13, 13))
    after = norms(lost, xp, [1, 1, 1, 1])
    assert shared(after, "model_norm_threshold") == 0 and shared(after, "num_clipped") == 1
    assert np.all(read(after, "w", "scale_grads").ravel()[0] == 0)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("variant", [SEED, "zip202305", "zip202310", "zip202407", NEWEST])
def test_gradients_that_are_not_finite(xp: Backend, variant: str, bad: float) -> None:
    p, g = arrays(4)
    grads = [{"w": g, "s": np.ones((), np.float32)}] * 5
    params = {"w": p, "s": np.ones((), np.float32)}
    begin = run(xp, state_of(params, variant, clipping_scale=2.0, clipping_update_period=4), *grads)
    broken = {"w": np.where(np.arange(4) == 2, np.float32(bad), g), "s": np.ones((), np.float32)}
    after = run(xp, begin, broken)
    zeroed = np.isinf(bad) and variant not in (SEED, "zip202305")
    assert np.isfinite(read(after, "w")).all() == zeroed
    if zeroed:
        still = run(xp, begin, {"w": g * 0, "s": np.zeros((), np.float32)})
        assert np.array_equal(read(after, "w"), read(still, "w"))
    elif np.isinf(bad):
        assert np.isfinite(np.delete(read(after, "w"), 2)).all() == (begin.counts.updates % 2 == 0)
    assert np.isfinite(float(read(after, "s")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["pt7", NEWEST])
def test_low_precision_keeps_its_dtypes(xp: Backend, variant: str, dtype: str) -> None:
    p, g = (x.astype(DTYPES[dtype]) for x in arrays(3, 5))
    after = run(xp, state_of({"w": p}, variant), {"w": g}, {"w": g})
    assert read(after, "w").dtype == DTYPES[dtype]
    dtypes = {tensor.dtype.name for tensor in after.slots["w"].values()}
    assert dtypes == ({dtype} if variant == "pt7" else {"float32"})


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_a_parameter_without_elements_steps(xp: Backend, shape: tuple[int, ...]) -> None:
    empty = np.zeros(shape, np.float32)
    params = {"e": empty, "w": np.ones(3, np.float32)}
    begin = state_of(params, clipping_scale=2.0, clipping_update_period=2)
    after = run(xp, begin, *[{"e": empty, "w": np.ones(3, np.float32)}] * 3)
    assert read(after, "e").shape == shape and np.isfinite(read(after, "w")).all()
    assert np.isfinite(shared(after, "model_norms")).all()


def test_buffers_of_another_length_and_unknown_hyperparameters_are_refused() -> None:
    state = state_of({"w": np.ones(3, np.float32)}, clipping_scale=2.0)
    for change in ({"size_update_period": 3}, {"clipping_update_period": 50}):
        with pytest.raises(StateError, match="length of the period"):
            mover(backend("numpy"), state.with_hyperparameters(**change))
    bare = Group(("w",), {name: value for name, value in DEFAULTS.items() if name not in ("eps", "betas")})
    with pytest.raises(UnknownRuleError, match=r"betas, eps(.|\n)*--hparams"):
        scaled_adam.check(state, bare)


@pytest.mark.parametrize(
    ("slot", "shape"),
    [
        ("param_rms", (5,)),
        ("scale_exp_avg_sq", ()),
        ("scale_grads", ()),
        ("scale_grads", (4,)),
        ("scale_grads", (4, 5)),
    ],
)
def test_slots_of_another_shape_are_no_state(slot: str, shape: tuple[int, ...]) -> None:
    """They were broadcast in the update, or ended it in Python's own error."""
    state = state_of({"w": np.ones(5, np.float32)})
    slots = {**state.slots["w"], slot: in_memory(np.ones(shape, np.float32))}
    with pytest.raises(StateError, match=f"slot {slot} has shape"):
        dataclasses.replace(state, slots={"w": slots})


def test_slots_of_a_group_have_the_schemas_rank() -> None:
    state = state_of({"w": np.ones(3, np.float32)}, clipping_scale=2.0)
    (group,) = state.optimizer.groups
    for slot, shape in (("model_norms", ()), ("num_clipped", (1,)), ("model_norm_threshold", (2,))):
        wrong = dataclasses.replace(group, slots={**group.slots, slot: in_memory(np.ones(shape))})
        with pytest.raises(StateError, match=f"expected rank [01] @ groups/0/{slot}"):
            dataclasses.replace(state, optimizer=dataclasses.replace(state.optimizer, groups=(wrong,)))


@pytest.mark.jax
def test_a_traced_step_makes_the_same_update() -> None:
    """JAX sees the step as a traced integer, NumPy as a number: two paths through the text."""
    p, _ = arrays(3, 4)
    grads = [{"w": arrays(3, 4, seed=i)[1]} for i in range(13)]
    begin = state_of({"w": p}, clipping_scale=0.9, clipping_update_period=12, size_update_period=3)
    traced, plain = run(backend("jax"), begin, *grads), run(backend("numpy"), begin, *grads)
    np.testing.assert_allclose(read(traced, "w"), read(plain, "w"), rtol=1e-5)
    assert shared(traced, "num_clipped") == shared(plain, "num_clipped") > 0
    threshold = "model_norm_threshold"
    assert float(shared(traced, threshold)) == pytest.approx(float(shared(plain, threshold)), rel=1e-6)


@given(st.floats(0.05, 0.99999), st.integers(1, 2_000_000))
@settings(max_examples=300)
def test_a_decay_correction_keeps_its_digits(base: float, updates: int) -> None:
    exact = -math.expm1(updates * math.log(base))
    bound = IntervalBackend(contracted=True).one_minus_power(base, updates)
    for name in ("numpy", "torch"):
        xp = backend(name)
        for exponent in (updates, xp.asarray(np.asarray(updates))):
            value = float(xp.one_minus_power(base, exponent))
            assert value == pytest.approx(exact, rel=10 * UNIT)
            assert bound.low <= np.float32(value) <= bound.high


@pytest.mark.jax
def test_a_traced_decay_correction_keeps_its_digits() -> None:
    import jax

    xp = backend("jax")
    updates = np.unique(np.geomspace(1, 2_000_000, 500).astype(np.int32))
    for base in (0.5, 0.95, 0.98, 0.999, 0.99999):
        traced = jax.jit(lambda k, b=base: xp.one_minus_power(b, k))(updates)
        exact = -np.expm1(updates.astype(np.float64) * math.log(base))
        assert np.max(np.abs(np.asarray(traced, np.float64) - exact) / exact) <= 10 * UNIT


@pytest.mark.parametrize("beta2", [0.5, 0.6, 0.8, 0.95, 0.97, 0.98, 0.99, 0.999, 0.1, 0.01])
def test_the_last_corrected_update_is_the_one_that_float64_finds(beta2: float) -> None:
    first = corrected_updates(beta2)
    assert [1.0 - beta2 ** (k + 1) < 0.99 for k in range(first + 3)] == [k < first for k in range(first + 3)]


def test_pytorchs_promotion() -> None:
    assert promoted("bfloat16", "bfloat16") == "bfloat16"
    assert promoted("bfloat16", "float16") == promoted("float32", "bfloat16") == "float32"


def test_order_statistics_rows_and_choices(xp: Backend) -> None:
    values = xp.asarray(np.array([3.0, np.nan, 1.0, 2.0], np.float32))
    assert [float(xp.order_statistic(values, i)) for i in range(3)] == [1, 2, 3]
    assert math.isnan(float(xp.order_statistic(values, 3)))
    rows = xp.set_row(xp.asarray(np.zeros((2, 3), np.float32)), 1, xp.asarray(np.ones(3, np.float32)))
    assert xp.numpy(rows).tolist() == [[0, 0, 0], [1, 1, 1]]
    assert float(xp.where(True, values[0], values[2])) == 3
    assert float(xp.sum(values[:1], values[2:])) == 6
    assert float(xp.sqrt(xp.number(4))) == 2


def test_the_bound_of_what_scaled_adam_adds() -> None:
    xp = IntervalBackend(contracted=True)
    rate = xp.number(0.1)
    assert rate.low == 0.1 and rate.high == float(np.float32(0.1))
    ragged = xp.sum(xp.asarray(np.ones(3, np.float32)), xp.asarray(np.ones((2, 2), np.float32)))
    assert ragged.low < 7 < ragged.high < 7.00001
    assert xp.narrow(xp.widen(1.0) + 1.0, "int64").low == 2
    unsure = xp.if_greater(rate, xp.number(0.1), xp.widen(1.0), 2.0)
    assert (unsure.low, unsure.high) == (1, 2)
    with np.errstate(all="ignore"):
        absent = xp.if_greater(xp.asarray(np.asarray(np.nan, np.float32)), 0.0, xp.widen(1.0), 2.0)
    assert (absent.low, absent.high) == (2, 2)
    odd = xp.asarray(np.array([1 + 2**-7], np.float32))
    product = (1.0 + 2**-9) * odd
    sum_of = xp.either(lambda: odd + product, lambda: odd + xp.rounded(product, "bfloat16"))
    assert sum_of.low < sum_of.high - 2**-9
