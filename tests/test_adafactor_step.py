"""Adafactor's one text: what its pieces do at the edges that T5X defines, in every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replaying import marks
from statekit.arrays.backend import BACKEND_NAMES, Backend, backend
from statekit.arrays.numpy_backend import ORACLE
from statekit.errors import UnknownRuleError, UsageError
from statekit.optim import adafactor
from statekit.optim.adafactor_forms import AdafactorHyperparameters
from statekit.optim.run import move_group, steps_for
from statekit.optim.steps import Scene
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState, next_decay
from statekit.tensors.tensor import DTYPES, Array, in_memory

R, C, B, N = Axis.ROW, Axis.COLUMN, Axis.BATCH, Axis.NONE
MATRIX = Rule((R, C), "given")
VECTOR = Rule((N,), "given")


@pytest.fixture(
    params=[
        "float64",
        *(pytest.param(name, marks=marks(name, name == "tensorflow")) for name in BACKEND_NAMES),
    ]
)
def xp(request: pytest.FixtureRequest) -> Backend:
    return ORACLE if request.param == "float64" else backend(request.param)


def hyper(**changes: Any) -> AdafactorHyperparameters:
    values = {**adafactor.defaults(), **changes}
    return adafactor.hyperparameters(Group(("p",), values), "p")


def step(
    xp: Backend,
    param: Array,
    grad: Array,
    rule: Rule,
    updates: int = 0,
    slots: Any = None,
    lr: float = 0.1,
    **changes: Any,
) -> tuple[Array, dict[str, Array]]:
    config = adafactor.ParamConfig(hyper(**changes), rule)

    def run(p: Any, g: Any, s: Any, rate: Any) -> Any:
        return adafactor.update(Scene(xp, "t5x", rate, updates), p, g, s, config, None)

    p = xp.asarray(param)
    fresh = adafactor.init(xp, p, config, "t5x")
    before = fresh if slots is None else {k: xp.asarray(v) for k, v in slots.items()}
    after, new = xp.compile(run)(p, xp.asarray(grad), before, xp.widen(lr))
    return xp.numpy(after), {name: xp.numpy(value) for name, value in new.items()}


def arrays(*shape: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)


def test_the_first_update_forgets_the_old_state(xp: Backend) -> None:
    p, g = arrays(4, 6)
    junk = {"v_row": np.full(4, 7, np.float32), "v_col": np.full(6, 7, np.float32)}
    fresh, slots = step(xp, p, g, MATRIX)
    again, same = step(xp, p, g, MATRIX, slots=junk)
    assert np.array_equal(fresh, again)
    np.testing.assert_allclose(slots["v_row"], (g.astype(np.float64) ** 2).mean(1), rtol=1e-6)
    np.testing.assert_allclose(same["v_col"], (g.astype(np.float64) ** 2).mean(0), rtol=1e-6)


def test_an_offset_at_the_step_forgets_too(xp: Backend) -> None:
    p, g = arrays(5)
    kept, _ = step(xp, p, g, VECTOR, updates=9, slots={"v": np.ones(5, np.float32)})
    reset, _ = step(xp, p, g, VECTOR, updates=9, slots={"v": np.ones(5, np.float32)}, step_offset=9)
    fresh, _ = step(xp, p, g, VECTOR)
    assert np.array_equal(reset, fresh) and not np.array_equal(kept, fresh)


def test_rows_and_columns_are_not_exchangeable(xp: Backend) -> None:
    p, g = arrays(6, 6)
    slots = {"v_row": np.arange(1, 7, dtype=np.float32), "v_col": np.full(6, 3.5, np.float32)}  # equal means
    swapped = {"v_row": slots["v_col"], "v_col": slots["v_row"]}
    right, _ = step(xp, p, g, MATRIX, updates=5, slots=slots)
    wrong, _ = step(xp, p, g, MATRIX, updates=5, slots=swapped)
    transposed, _ = step(xp, p, g, Rule((C, R), "given"), updates=5, slots=swapped)
    assert np.max(np.abs(right - wrong)) > 1e-3
    np.testing.assert_allclose(right, transposed, rtol=1e-5, atol=1e-6)


def test_a_batch_axis_makes_separate_parameters(xp: Backend) -> None:
    p, g = arrays(4, 3, 6)
    stacked, slots = step(xp, p * np.array([1, 10, 100], np.float32)[:, None], g, Rule((R, B, C), "given"))
    assert slots["v_row"].shape == (4, 3) and slots["v_col"].shape == (3, 6)
    for i in range(3):
        alone, alone_slots = step(xp, p[:, i] * np.float32(10**i), g[:, i], MATRIX)
        np.testing.assert_allclose(stacked[:, i], alone, rtol=1e-5)
        np.testing.assert_allclose(slots["v_row"][:, i], alone_slots["v_row"], rtol=1e-5)
        np.testing.assert_allclose(slots["v_col"][i], alone_slots["v_col"], rtol=1e-5)


def test_a_rule_with_columns_only_keeps_the_full_row(xp: Backend) -> None:
    p, g = arrays(3, 4)
    after, slots = step(xp, p, g, Rule((N, C), "given"))
    assert slots["v_row"].shape == (3,) and slots["v_col"].shape == (3, 4)
    assert np.isfinite(after).all()


@pytest.mark.parametrize("clip", [None, 1.0])
def test_skipped_nans_leave_what_was_there(xp: Backend, clip: float | None) -> None:
    p, g = arrays(3, 4)
    g[1, 2] = np.nan
    slots = {"v_row": np.ones(3, np.float32), "v_col": np.ones(4, np.float32)}
    after, new = step(
        xp, p, g, MATRIX, updates=3, slots=slots, skip_nan_updates=True, clipping_threshold=clip
    )
    assert new["v_row"][1] == 1 and new["v_col"][2] == 1 and (new["v_row"][[0, 2]] != 1).all()
    untouched = after == p
    assert untouched.all() if clip else untouched[1].all() and untouched[:, 2].all()
    poisoned, _ = step(xp, p, g, MATRIX, updates=3, slots=slots)
    assert np.isnan(poisoned).all()


def test_weight_decay_comes_last_and_a_rate_of_zero_counts_as_one_with_an_exponent(xp: Backend) -> None:
    p, g = arrays(7)
    plain, _ = step(xp, p, g, VECTOR)
    decayed, _ = step(xp, p, g, VECTOR, weight_decay_rate=0.25)
    np.testing.assert_allclose(decayed, plain - 0.25 * p, rtol=1e-5, atol=1e-6)
    by_rate, _ = step(xp, p, g, VECTOR, weight_decay_rate=0.0, weight_decay_rate_lr_exponent=2.0)
    np.testing.assert_allclose(by_rate, plain - 0.01 * p, rtol=1e-5, atol=1e-6)
    ignored, _ = step(xp, p, g, VECTOR, weight_decay_rate_lr_exponent=0.0)
    assert np.array_equal(ignored, plain)


def test_low_precision_parameters_and_momentum_keep_their_dtypes(xp: Backend) -> None:
    p, g = (x.astype(DTYPES["bfloat16"]) for x in arrays(4, 6))
    after, slots = step(xp, p, g, MATRIX, beta1=0.9, dtype_momentum="bfloat16")
    assert after.dtype == DTYPES["bfloat16"] and slots["m"].dtype == DTYPES["bfloat16"]
    assert slots["v_row"].dtype == np.float32


@pytest.mark.parametrize("shape", [(0,), (0, 4), (1,), ()])
def test_empty_and_scalar_parameters_step(xp: Backend, shape: tuple[int, ...]) -> None:
    p, g = arrays(*shape)
    after, _ = step(xp, np.asarray(p), np.asarray(g), Rule((N,) * len(shape), "given"))
    assert after.shape == shape and np.isfinite(after).all()


def test_a_zero_gradient_moves_nothing(xp: Backend) -> None:
    p, g = arrays(4, 6)
    after, slots = step(xp, p, g * 0, MATRIX)
    assert np.array_equal(after, p)
    np.testing.assert_allclose(slots["v_row"], 1e-30, rtol=1e-6)


def test_the_global_norm_is_clipped_as_t5x_clips_it(xp: Backend) -> None:
    grads = {"b": np.full(3, 3, np.float32), "a/x": np.full(1, 4, np.float32)}
    clipped = adafactor.clip_by_global_norm(xp, {k: xp.asarray(g) for k, g in grads.items()}, 1.0)
    norm = np.sqrt(27.0 + 16)
    np.testing.assert_allclose(xp.numpy(clipped["b"]), grads["b"] / norm, rtol=1e-6)
    free = adafactor.clip_by_global_norm(xp, {k: xp.asarray(g) for k, g in grads.items()}, 0.0)
    assert np.array_equal(xp.numpy(free["b"]), grads["b"])


def test_a_permutation_of_parameters_changes_nothing(xp: Backend) -> None:
    names = ["a", "b/x", "b", "c"]
    params = {name: arrays(4, 6, seed=i)[0] for i, name in enumerate(names)}
    grads = {name: arrays(4, 6, seed=i)[1] for i, name in enumerate(names)}
    values = {**adafactor.defaults(), "global_norm_clip_threshold": 0.5}
    results = []
    for order in (names, names[::-1]):
        group = Group(tuple(order), values)
        settled = adafactor.settle(group, "a", MATRIX, "t5x")
        live = {n: xp.asarray(params[n]) for n in order}
        slots = {n: adafactor.init(xp, live[n], settled, "t5x") for n in order}
        moved, _, _ = move_group(
            steps_for("adafactor", "t5x"),
            Scene(xp, "t5x", xp.widen(0.1), 0),
            group,
            dict.fromkeys(order, settled),
            live,
            {n: xp.asarray(grads[n]) for n in order},
            slots,
            {},
        )
        results.append({n: xp.numpy(moved[n]) for n in names})
    assert all(np.array_equal(results[0][n], results[1][n]) for n in names)


def test_unknown_rules_and_hyperparameters_are_named() -> None:
    with pytest.raises(UnknownRuleError, match=r"epsilon2(.|\n)*--hparams"):
        adafactor.hyperparameters(
            Group(("p",), {k: v for k, v in adafactor.defaults().items() if k != "epsilon2"}), "p"
        )
    with pytest.raises(UnknownRuleError, match="assumed: ROW, BATCH, COLUMN"):
        adafactor.check_rule(Rule((R, B, C), "assumed"), "p", 3)
    assert adafactor.check_rule(Rule((R, C), "assumed"), "p", 2).factored


@pytest.mark.parametrize(
    ("variant", "excluded", "kept"),
    [
        ("keras", ["kernel"], {"enc/kernel": None, "kernel/bias": 0.1}),
        ("optax", {"enc/kernel": True, "kernel/bias": False}, {"enc/kernel": None, "kernel/bias": 0.1}),
        ("keras", None, {"enc/kernel": 0.1, "kernel/bias": 0.1}),
    ],
)
def test_some_parameters_are_kept_from_decay(variant: str, excluded: Any, kept: dict[str, Any]) -> None:
    values = {**adafactor.defaults(variant), "weight_decay_rate": 0.1, "exclude_from_weight_decay": excluded}
    group = Group(tuple(kept), values)
    configs = {path: adafactor.settle(group, path, VECTOR, variant) for path in kept}
    assert {path: config.hyper.weight_decay_rate for path, config in configs.items()} == kept
    assert len({hash(config) for config in configs.values()}) == len(set(kept.values()))


@pytest.mark.parametrize(
    ("variant", "followed"), [("torch", True), ("hf", True), ("keras", False), ("optax", True)]
)
def test_low_precision_is_stepped_where_its_roundings_are_known(variant: str, followed: bool) -> None:
    low = {"p": in_memory(np.ones((2, 3), DTYPES["bfloat16"]))}
    group = Group(("p",), adafactor.defaults(variant))
    state = TrainState(low, {}, Optimizer("adafactor", variant, (group,)), Counts(0, 0), {"p": MATRIX})
    if followed:
        adafactor.check(state, group)
        return
    with pytest.raises(UnknownRuleError, match="isn't reproduced yet"):
        adafactor.check(state, group)


def test_the_decay_for_people_knows_the_hole_at_the_offset() -> None:
    assert next_decay(0, 0, 0.8) == 0
    assert next_decay(1_000_000, 0, 0.8) == pytest.approx(1 - 1.58489e-05, rel=1e-8)
    with pytest.raises(UsageError, match="NaN for good"):
        next_decay(3, 4, 0.8)
