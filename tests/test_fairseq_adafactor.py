"""fairseq's Adafactor against a second writing of its rule, in float64 and few lines; nobody recorded the original."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replaying import everywhere
from statekit.arrays.backend import Backend, backend
from statekit.arrays.intervals import Interval, IntervalBackend
from statekit.optim import adafactor
from statekit.optim.run import initial, load, mover, store
from statekit.state.constants import variant_constants
from statekit.state.factoring import by_shape
from statekit.state.train_state import Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Array, in_memory

SHAPES = {"embed": (4, 6), "bias": (7,), "heads": (3, 4, 5)}
SLOTS = {2: ("v_row", "v_col", "m"), 3: ("v_row", "v_col", "m"), 1: ("v", "m")}
GIVEN: dict[str, Any] = {"relative_step": False, "beta1": 0.9, "weight_decay_rate": 0.05, "epsilon2": 1e-2}
CASES: dict[str, dict[str, Any]] = {
    "compounding": GIVEN,
    "without scale": {**GIVEN, "multiply_by_parameter_scale": False},
    "relative": {**GIVEN, "relative_step": True},
    "warming up": {**GIVEN, "relative_step": True, "warmup_init": True},
}
RATE = 0.3


def rms(x: Array) -> float:
    return float(np.linalg.norm(x.ravel()) / x.size**0.5)


def fairseq(
    params: dict[str, Array], grads: dict[str, Array], slots: dict[str, Any], t: int, **h: Any
) -> float:
    """Updates parameters and slots in place, in the group's order, and returns what becomes of the group's rate."""
    lr = RATE
    for path, p in params.items():
        if path not in grads:
            continue
        g, s = grads[path], slots[path]
        rel = lr
        if h["relative_step"]:
            rel = min(1e-6 * t if h["warmup_init"] else 1e-2, t**-0.5)
        lr = rel * (max(h["epsilon2"], rms(p)) if h["multiply_by_parameter_scale"] else 1.0)
        b2, q = 1 - t ** -h["decay_rate"], g**2 + h["epsilon1"]
        if p.ndim >= 2:
            s["v_row"][...] = b2 * s["v_row"] + (1 - b2) * q.mean(-1)
            s["v_col"][...] = b2 * s["v_col"] + (1 - b2) * q.mean(-2)
            row = s["v_row"] / s["v_row"].mean(-1, keepdims=True)
            u = g / np.sqrt(row)[..., None] / np.sqrt(s["v_col"])[..., None, :]
        else:
            s["v"][...] = b2 * s["v"] + (1 - b2) * q
            u = g / np.sqrt(s["v"])
        u = u / max(1.0, rms(u) / h["clipping_threshold"]) * lr
        s["m"][...] = h["beta1"] * s["m"] + (1 - h["beta1"]) * u
        p[...] -= h["weight_decay_rate"] * lr * p
        p[...] -= s["m"]
    return lr


def fresh(variant: str, changes: dict[str, Any], paths: tuple[str, ...] = tuple(SHAPES)) -> TrainState:
    random = np.random.default_rng(3)
    params = {p: in_memory(random.normal(0, 0.4, s).astype(np.float32), p) for p, s in SHAPES.items()}
    rules = {
        p: Rule(by_shape(variant_constants("adafactor", variant), SHAPES[p], True), "given") for p in SHAPES
    }
    group = Group(paths, {**adafactor.defaults(variant), **changes})
    return initial(TrainState(params, {}, Optimizer("adafactor", variant, (group,)), Counts(0, 0), rules))


def gradients(update: int) -> dict[str, Array]:
    random = np.random.default_rng(10 + update)
    return {p: random.normal(0, 0.1, s).astype(np.float32) for p, s in SHAPES.items()}


def moved(xp: Backend, state: TrainState, grads: dict[str, Array]) -> TrainState:
    live = mover(xp, state)(load(xp, state), {p: xp.asarray(g) for p, g in grads.items()}, RATE)
    return store(xp, live, state)


def bound(state: TrainState, grads: dict[str, Array]) -> dict[str, dict[str, Interval]]:
    xp = IntervalBackend(True)
    live = mover(xp, state)(load(xp, state), {p: xp.asarray(g) for p, g in grads.items()}, RATE)
    return {path: {"param": live.params[path], **live.slots[path]} for path in SHAPES}


def misses(interval: Interval, value: Array) -> int:
    return int(np.sum((value < interval.low) | (value > interval.high)))


def written_twice(state: TrainState, grads: dict[str, Array]) -> dict[str, dict[str, Array]]:
    """The second writing's parameters and slots after one update."""
    order = state.optimizer.groups[0].paths
    params = {p: state.params[p].read().astype(np.float64) for p in order}
    slots = {
        p: {n: t.read().astype(np.float64) for n, t in tensors.items()} for p, tensors in state.slots.items()
    }
    wide = {p: g.astype(np.float64) for p, g in grads.items()}
    fairseq(params, wide, slots, state.counts.updates + 1, **state.optimizer.groups[0].hyperparameters)
    return {p: {"param": params[p], **slots[p]} for p in SHAPES}


@pytest.mark.parametrize(("name", "case"), everywhere(list(CASES), []))
def test_every_step_and_its_second_writing_lie_in_the_bound(name: str, case: str) -> None:
    state = fresh("fairseq", CASES[case])
    assert {len(SHAPES[path]): tuple(tensors) for path, tensors in state.slots.items()} == SLOTS
    for update in range(3):
        grads = gradients(update)
        inside, twice = bound(state, grads), written_twice(state, grads)
        after = moved(backend(name), state, grads)
        for path in SHAPES:
            ours = {"param": after.params[path], **after.slots[path]}
            for tensor, interval in inside[path].items():
                assert not misses(interval, twice[path][tensor]), (update, path, tensor)
                assert not misses(interval, ours[tensor].read().astype(np.float64)), (update, path, tensor)
        state = after


def test_what_compounds_is_seen() -> None:
    state, grads = fresh("fairseq", GIVEN), gradients(0)
    inside, plain = bound(state, grads), moved(backend("numpy"), fresh("hf", GIVEN), grads)
    lost = {path: misses(inside[path]["param"], plain.params[path].read()) for path in SHAPES}
    assert not lost["embed"] and lost["bias"] and lost["heads"]


def test_with_a_rate_of_its_own_it_is_hugging_faces() -> None:
    ours, theirs = (
        moved(backend("numpy"), fresh(v, CASES["relative"]), gradients(0)) for v in ("fairseq", "hf")
    )
    assert all(np.array_equal(t.read(), theirs.params[path].read()) for path, t in ours.params.items())


def test_the_order_of_parameters_counts_and_one_without_a_gradient_doesnt() -> None:
    there = moved(backend("numpy"), fresh("fairseq", GIVEN), gradients(0))
    back = moved(backend("numpy"), fresh("fairseq", GIVEN, tuple(reversed(SHAPES))), gradients(0))
    assert not np.array_equal(there.params["embed"].read(), back.params["embed"].read())
    some = {path: grad for path, grad in gradients(0).items() if path != "bias"}
    skipped = moved(backend("numpy"), fresh("fairseq", GIVEN), some)
    without = fresh("fairseq", GIVEN, ("embed", "heads"))
    fewer = moved(backend("numpy"), without, some)
    assert np.array_equal(skipped.params["heads"].read(), fewer.params["heads"].read())
    assert np.array_equal(skipped.params["bias"].read(), fresh("fairseq", GIVEN).params["bias"].read())


def test_parameters_that_find_different_rates_are_never_updated_together() -> None:
    group = Group(("a", "b"), {**adafactor.defaults("fairseq"), **GIVEN})
    rule = Rule(by_shape(variant_constants("adafactor", "fairseq"), (4, 6), True), "given")
    first, second = (adafactor.settle(group, path, rule, "fairseq") for path in group.paths)
    assert first != second
    assert adafactor.settle(group, "a", rule, "hf") == adafactor.settle(group, "b", rule, "hf")
