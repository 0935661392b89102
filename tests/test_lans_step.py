"""LANS at the edges where MXNet's paths, the paper and Apex part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from replaying import everywhere, marks
from statekit.arrays.backend import BACKEND_NAMES, Backend, backend
from statekit.arrays.intervals import UNIT, IntervalBackend, scaled_norm_error
from statekit.arrays.numpy_backend import ORACLE
from statekit.errors import StateError, UnknownRuleError
from statekit.optim import lans
from statekit.optim.run import initial, load, mover, store
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import Array, in_memory

FUSED, UNFUSED = "mxnet_fused", "mxnet_unfused"
EXACT = {"beta1": 0.875, "beta2": 0.9375, "epsilon": 2.0**-20, "wd": 0.25}
"""Float32 has these exactly, so that 1 - beta rounds nowhere."""


@pytest.fixture(
    params=[pytest.param(name, marks=marks(name, name == "tensorflow")) for name in BACKEND_NAMES]
)
def xp(request: pytest.FixtureRequest) -> Backend:
    return backend(request.param)


def state_of(variant: str, params: Mapping[str, Array], updates: int = 0, **changes: Any) -> TrainState:
    given = {**load_schema("lans").variant(variant)["defaults"], **EXACT, **changes}
    tensors = {path: in_memory(np.asarray(array), path) for path, array in params.items()}
    optimizer = Optimizer("lans", variant, (Group(tuple(params), given),))
    return initial(TrainState(tensors, {}, optimizer, Counts(updates, updates)))


def run(xp: Backend, state: TrainState, *grads: Mapping[str, Array], lr: float = 0.125) -> TrainState:
    move, live = mover(xp, state), load(xp, state)
    for grad in grads:
        live = move(live, {path: xp.asarray(np.asarray(g)) for path, g in grad.items()}, lr)
    return store(xp, live, state)


def moved(xp: Backend, variant: str, param: Array, *grads: Array, lr: float = 0.125, **changes: Any) -> Array:
    after = run(xp, state_of(variant, {"a": param}, **changes), *({"a": g} for g in grads), lr=lr)
    return after.params["a"].read()


def drawn(seed: int, *shape: int) -> Array:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


def by_hand(p: Array, grads: list[Array], lr: float, moved_weight: bool = False) -> Array:
    """The paper's algorithm as it is written, in float64."""
    b1, b2, eps, wd = (EXACT[name] for name in ("beta1", "beta2", "epsilon", "wd"))
    x, m, v = p.astype(np.float64), np.zeros(p.shape), np.zeros(p.shape)
    for t, grad in enumerate(grads, start=1):
        g = grad.astype(np.float64) / np.linalg.norm(grad.astype(np.float64))
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        root, size = np.sqrt(v / (1 - b2**t)) + eps, np.linalg.norm(x)
        r = m / (1 - b1**t) / root + wd * x
        first = lr * b1 * size / np.linalg.norm(r) * r
        c = g / root + wd * (x - first if moved_weight else x)
        x = x - first - lr * (1 - b1) * size / np.linalg.norm(c) * c
    return x


@pytest.mark.parametrize("variant", ["paper", FUSED, "mxnet_gpu", UNFUSED])
def test_the_oracle_is_the_papers_algorithm(variant: str) -> None:
    p, grads = drawn(0, 4, 3), [drawn(seed, 4, 3) for seed in (1, 2, 3)]
    ours = moved(ORACLE, variant, p, *grads)
    expected = by_hand(p, grads, 0.125, moved_weight=variant == UNFUSED)
    assert np.allclose(ours, expected, rtol=2e-7, atol=1e-7)  # stored as float32, between the steps too
    other = by_hand(p, grads, 0.125, moved_weight=variant != UNFUSED)
    assert np.max(np.abs(other - expected)) > 1e-4


@pytest.mark.parametrize(("name", "variant"), everywhere(load_schema("lans").stepped, (FUSED,)))
def test_every_backend_agrees_with_the_oracle(name: str, variant: str) -> None:
    xp, p, grads = backend(name), drawn(0, 4, 3), [drawn(seed, 4, 3) for seed in (1, 2, 3)]
    ours, exact = moved(xp, variant, p, *grads), moved(ORACLE, variant, p, *grads)
    assert np.allclose(ours, exact, rtol=2e-5, atol=2e-6)


def test_an_all_zero_gradient(xp: Backend) -> None:
    p, zero = drawn(0, 5), np.zeros(5, np.float32)
    for variant in (FUSED, UNFUSED, "paper"):
        assert np.isnan(moved(xp, variant, p, zero)).all()
        if variant != "paper":
            assert np.isnan(moved(xp, variant, p, zero, clip_gradient=0.5)).all()
    assert np.isnan(moved(xp, "mxnet_gpu", p, zero)).all()
    state = run(xp, state_of("mxnet_gpu", {"a": p}, clip_gradient=0.5), {"a": zero})
    assert np.allclose(state.slots["a"]["m"].read(), 0.125 * 0.5)  # the NaN became +clip_gradient
    assert not np.isnan(state.params["a"].read()).any()
    skipped = run(xp, state_of("apex_fused", {"a": p}), {"a": zero})
    assert np.array_equal(skipped.slots["a"]["m"].read(), zero)
    assert np.allclose(
        skipped.params["a"].read(), p * (1 - 0.125), rtol=1e-6
    )  # weight decay alone, at full ratio


@pytest.mark.parametrize(("size", "fused", "unfused"), [(1e-25, "broken", "moves"), (1e25, "still", "moves")])
def test_squares_overflow_and_underflow_in_the_fused_norm_only(
    size: float, fused: str, unfused: str, xp: Backend
) -> None:
    p, grad = drawn(0, 4), (drawn(1, 4) * np.float32(size)).astype(np.float32)
    for variant, outcome in ((FUSED, fused), (UNFUSED, unfused)):
        state = run(xp, state_of(variant, {"a": p}), {"a": grad})
        m = state.slots["a"]["m"].read()
        if outcome == "broken":  # a division by 0
            assert np.isinf(m).all() and np.isnan(state.params["a"].read()).all()
        else:
            assert np.all((m != 0) == (outcome == "moves"))


def test_an_infinite_gradient(xp: Backend) -> None:
    p, grad = drawn(0, 3), np.asarray([1.0, np.inf, -2.0], np.float32)
    fused, unfused = (
        run(xp, state_of(v, {"a": p}), {"a": grad}).slots["a"]["m"].read() for v in (FUSED, UNFUSED)
    )
    for m in (fused, unfused):
        assert np.isnan(m[1]) and m[0] == m[2] == 0
    assert np.isnan(moved(xp, FUSED, p, grad)).all()
    assert list(np.isnan(moved(xp, UNFUSED, p, grad))) == [False, True, False]


def test_a_weight_of_norm_0_moves_at_ratio_1(xp: Backend) -> None:
    zero, grad = np.zeros(2, np.float32), np.asarray([3.0, -4.0], np.float32)
    for variant in load_schema("lans").stepped:
        after = moved(xp, variant, zero, grad, epsilon=0.0, wd=0.0)
        assert np.allclose(after, [-0.125, 0.125], rtol=1e-5), variant


@pytest.mark.parametrize(("name", "fused_ignores"), [("upper_bound", True), ("clip_gradient", True)])
def test_bounds_of_zero_count_as_off_in_the_fused_path_only(
    name: str, fused_ignores: bool, xp: Backend
) -> None:
    p, grad = drawn(0, 4) * 3, drawn(1, 4)
    for variant, ignored in ((FUSED, fused_ignores), (UNFUSED, False)):
        without, with_zero = moved(xp, variant, p, grad), moved(xp, variant, p, grad, **{name: 0.0})
        assert np.array_equal(without, with_zero) == ignored
    assert np.array_equal(moved(xp, UNFUSED, p, grad), moved(xp, UNFUSED, p, grad, lower_bound=0.0))


def test_multipliers_belong_to_parameters(xp: Backend) -> None:
    p, grad = drawn(0, 4), drawn(1, 4)
    params, grads = {"a": p, "b": p, "c": p}, {"a": grad, "b": grad, "c": grad}
    state = state_of(FUSED, params, lr_mult={"a": 0.5}, wd_mult={"b": 0.0})
    after = {path: tensor.read() for path, tensor in run(xp, state, grads).params.items()}
    assert np.array_equal(after["a"], moved(xp, FUSED, p, grad, lr=0.0625))
    assert np.array_equal(after["b"], moved(xp, FUSED, p, grad, wd=0.0))
    assert np.array_equal(after["c"], moved(xp, FUSED, p, grad))


def test_a_run_may_go_on_with_its_count_or_with_begin_num_update(xp: Backend) -> None:
    p, grads = drawn(0, 4), [{"a": drawn(seed, 4)} for seed in (1, 2, 3)]
    through = run(xp, state_of(UNFUSED, {"a": p}), *grads)
    half = run(xp, state_of(UNFUSED, {"a": p}), *grads[:2])
    assert np.array_equal(run(xp, half, grads[2]).params["a"].read(), through.params["a"].read())
    bare = state_of(UNFUSED, {"a": half.params["a"].read()}, begin_num_update=2)  # a file without counts
    began = TrainState(bare.params, half.slots, bare.optimizer, Counts(0, 0))
    assert np.array_equal(run(xp, began, grads[2]).params["a"].read(), through.params["a"].read())
    forgotten = TrainState(half.params, half.slots, half.optimizer, Counts(0, 0))
    assert not np.array_equal(run(xp, forgotten, grads[2]).params["a"].read(), through.params["a"].read())


def test_masters_move_and_parameters_follow_rounded(xp: Backend) -> None:
    p, grads = drawn(0, 4, 2).astype(np.float16), [drawn(seed, 4, 2).astype(np.float16) for seed in (1, 2)]
    for variant in (FUSED, UNFUSED):
        state = state_of(variant, {"a": p, "b": p.astype(np.float32)}, multi_precision=True)
        assert {path: set(tensors) for path, tensors in state.slots.items()} == {
            "a": {"m", "v", "master"},
            "b": {"m", "v"},
        }
        assert np.array_equal(state.slots["a"]["master"].read(), p.astype(np.float32))
        given: list[dict[str, Array]] = [{"a": g, "b": g.astype(np.float32)} for g in grads]
        after = run(xp, state, *given)
        master = after.slots["a"]["master"].read()
        assert master.dtype == np.float32 and after.params["a"].dtype == np.float16
        assert np.array_equal(after.params["a"].read(), master.astype(np.float16))
        assert np.any(master != after.params["a"].read())


def test_a_parameter_may_be_subnormal_in_float16(xp: Backend) -> None:
    subnormal = np.asarray([2.0**-24, -3.0 * 2.0**-25, 2.0**-14 - 2.0**-25, 1e-9, 1.0], np.float32)
    narrowed = xp.compile(lambda value: xp.narrow(value, "float16"))(xp.asarray(subnormal))
    rounded = xp.compile(lambda value: xp.rounded(value, "float16"))(xp.asarray(subnormal))
    assert np.array_equal(xp.numpy(narrowed), subnormal.astype(np.float16))
    assert np.array_equal(xp.numpy(rounded), subnormal.astype(np.float16))


def test_apex_adds_epsilon_to_the_norm_and_has_its_switches(xp: Backend) -> None:
    p, grad = drawn(0, 4), drawn(1, 4)
    state = run(xp, state_of("apex_fused", {"a": p}, epsilon=1.0), {"a": grad})
    norm = np.linalg.norm(grad.astype(np.float64))
    assert np.allclose(state.slots["a"]["m"].read(), 0.125 * grad / (norm + 1), rtol=1e-5)
    plain = run(xp, state_of("apex_fused", {"a": p}, normalize_grad=False), {"a": grad})
    assert np.allclose(plain.slots["a"]["m"].read(), 0.125 * grad, rtol=1e-6)
    whole = run(xp, state_of("apex_fused", {"a": p}, grad_averaging=False, normalize_grad=False), {"a": grad})
    assert np.allclose(whole.slots["a"]["m"].read(), grad, rtol=1e-6)
    l2 = run(xp, state_of("apex_fused", {"a": p}, adam_w_mode=False, normalize_grad=False), {"a": grad})
    assert np.allclose(l2.slots["a"]["m"].read(), 0.125 * (grad + 0.25 * p), rtol=1e-6)


def test_parameters_without_elements_and_without_axes(xp: Backend) -> None:
    params = {"none": np.zeros((0, 3), np.float32), "one": np.asarray(2.0, np.float32)}
    grads = {"none": np.zeros((0, 3), np.float32), "one": np.asarray(-5.0, np.float32)}
    for variant in load_schema("lans").stepped:
        after = run(xp, state_of(variant, params), grads)
        assert after.params["none"].shape == (0, 3)
        assert np.allclose(
            after.params["one"].read(), 2.25 if variant != UNFUSED else after.params["one"].read()
        )


def test_a_scaled_norm_lies_in_its_bound(xp: Backend) -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 2, 50, 3000):
        for scale in (1e-30, 1.0, 1e30):
            array = np.sort(np.abs(rng.normal(size=size))).astype(np.float32) * np.float32(scale)
            bound = IntervalBackend(contracted=True)
            interval = bound.norm(bound.asarray(array))
            ours = float(xp.numpy(xp.norm(xp.asarray(array))))
            assert interval.low <= ours <= interval.high
            assert interval.low <= running_norm(array) <= interval.high


def running_norm(array: Array) -> float:
    """MXNet's norm: the sum is scaled whenever the largest size so far rises."""
    largest, total = np.float32(0), np.float32(0)
    for size in np.abs(array):
        if largest < size:
            total, largest = np.float32(1) + total * (largest / size) * (largest / size), size
        elif size:
            total = total + (size / largest) * (size / largest)
    return float(largest * np.sqrt(total))


def test_the_bound_of_a_scaled_norm_counts_what_rises() -> None:
    falling, rising = np.linspace(2, 1, 9), np.linspace(1, 2, 9)
    assert scaled_norm_error(rising) - scaled_norm_error(falling) == pytest.approx(8 * 4 * UNIT / 2)


def test_what_mxnet_cant_hold_is_refused() -> None:
    numpy = backend("numpy")
    half = {"a": np.ones(2, np.float16)}
    with pytest.raises(UnknownRuleError, match="float16"):
        mover(numpy, state_of(FUSED, half))  # MXNet raises as well without multi_precision
    mover(numpy, state_of(FUSED, half, multi_precision=True))
    with pytest.raises(UnknownRuleError, match="float64"):
        mover(numpy, state_of(UNFUSED, {"a": np.ones(2)}))
    with pytest.raises(StateError, match="can't step"):
        mover(numpy, state_of("habana", {"a": np.ones(2, np.float32)}))


@pytest.mark.parametrize("variant", [FUSED, UNFUSED])
def test_a_parameter_without_a_gradient_falls_behind_by_its_own_count(variant: str, xp: Backend) -> None:
    p, first, second = drawn(3, 4), drawn(4, 4), drawn(5, 4)
    pair = run(xp, state_of(variant, {"a": p, "b": p}), {"a": first}, {"a": second, "b": first})
    alone = run(xp, state_of(variant, {"b": p}), {"b": first})
    whole = run(xp, state_of(variant, {"a": p}), {"a": first}, {"a": second})
    assert pair.counts.updates == 2 and pair.counts.behind == {"b": 1}
    assert np.array_equal(pair.params["b"].read(), alone.params["b"].read())
    assert np.array_equal(pair.params["a"].read(), whole.params["a"].read())
    late = dataclasses.replace(pair, counts=Counts(2, 2))  # the count of b forgotten
    kept, lost = run(xp, pair, {"a": first, "b": second}), run(xp, late, {"a": first, "b": second})
    assert not np.array_equal(kept.params["b"].read(), lost.params["b"].read())
    both = run(xp, state_of(variant, {"b": p}), {"b": first}, {"b": second})
    assert np.array_equal(kept.params["b"].read(), both.params["b"].read())


def test_the_paper_has_no_defaults() -> None:
    group = Group(("a",), dict(load_schema("lans").variant("paper")["defaults"]))
    with pytest.raises(UnknownRuleError, match=r"beta1, beta2, epsilon, wd"):
        lans.settle(group, "a", None, "paper")
