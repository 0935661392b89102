"""`statekit verify` late in a run: float32 powers of a decay are no difference of rules; a moved number is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import state_writer

from goldens import COMPACT
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.conversion.contracts import Exactness, Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.optim.run import load, mover, store
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import in_memory
from statekit.verify.side_by_side import SideBySide, _as_loaded
from statekit.verify.stepping import Side, rates_of
from statekit.verify.verification import verify

LATE = 1000
SHAPE = (24, 16)


@cache
def adamw() -> TrainState:
    """Returns a run of torch's AdamW in the middle of its training."""
    draw = np.random.default_rng(1)

    def noise(scale: float) -> Any:
        return (scale * draw.standard_normal(SHAPE)).astype(np.float32)

    params = {path: in_memory(noise(1.0), path) for path in ("encoder", "decoder")}
    slots = {
        path: {"m": in_memory(noise(1e-3), "m"), "v": in_memory(np.square(noise(1e-2)), "v")}
        for path in params
    }
    values = {**load_schema("adamw").variant("torch")["defaults"], "learning_rate": 1e-3}
    group = Group(tuple(params), values, dict.fromkeys(values, "given"))
    return TrainState(params, slots, Optimizer("adamw", "torch", (group,)), Counts(LATE, LATE))


@cache
def adafactor() -> TrainState:
    """Returns a run of T5X that is made late."""
    with open_state(
        COMPACT / "t5x/momentum_f32/checkpoint/checkpoint_4", hints=Hints({"beta1": 0.9})
    ) as opened:
        xp = NumpyBackend()
        state = store(xp, load(xp, opened.state), opened.state)
    return replace(said(state, {"learning_rate": 1e-3}), extra={}, counts=Counts(LATE, LATE))


def said(state: TrainState, values: Mapping[str, Any]) -> TrainState:
    """Returns a state with other hyperparameters."""
    groups = [
        replace(group, hyperparameters={**group.hyperparameters, **values})
        for group in state.optimizer.groups
    ]
    return replace(state, optimizer=replace(state.optimizer, groups=tuple(groups)))


def under(variant: str, state: TrainState) -> TrainState:
    """Returns a state under another variant's rule, with all hyperparameters that both have."""
    defaults = load_schema(state.optimizer.schema).variant(variant)["defaults"]
    groups = tuple(
        replace(
            group,
            hyperparameters={
                name: group.hyperparameters.get(name, value) for name, value in defaults.items()
            },
        )
        for group in state.optimizer.groups
    )
    return replace(state, optimizer=replace(state.optimizer, variant=variant, groups=groups))


def outside(carried: TrainState, expected: TrainState, actual: TrainState | None = None) -> dict[str, int]:
    """Returns how many elements of all probes leave the source's, the target's bound, and where rules part."""
    sides = SideBySide(carried, expected, actual or expected, ("statekit", "statekit"), Exactness.ROUNDING)
    replay, verdicts, _ = sides.run("random", 1, NumpyBackend(), 0, True, lambda _: None)
    counts = {
        name: sum(probe["outside"][name] for probe in replay["probes"])
        for name in ("source", "target", "rule")
    }
    assert any(counts.values()) == any(verdict == "refuted" for verdict, _ in verdicts.values())
    return counts


RUNS = {"adamw": (adamw, ("torch", "optax")), "adafactor": (adafactor, ("t5x", "optax"))}
PAIRS = [(name, *pair) for name, (_, both) in RUNS.items() for pair in (both, both[::-1])]


@pytest.mark.parametrize(("name", "source", "target"), PAIRS)
def test_two_precisions_of_one_rule_are_rounding(name: str, source: str, target: str) -> None:
    state = RUNS[name][0]()
    assert outside(under(source, state), under(target, state)) == {"source": 0, "target": 0, "rule": 0}


MOVED: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "adamw": ({"beta2": 0.998}, {"beta1": 0.89}, {"epsilon": 1e-7}, {"weight_decay_rate": 0.011}),
    "adafactor": ({"decay_rate": 0.79}, {"beta1": 0.89}, {"epsilon1": 1e-6}),
}


@pytest.mark.parametrize(("name", "source", "target"), PAIRS)
def test_a_moved_number_and_a_step_more_are_seen(name: str, source: str, target: str) -> None:
    state = RUNS[name][0]()
    carried, expected = under(source, state), under(target, state)
    late = replace(expected, counts=Counts(LATE + 1, LATE + 1))
    for wrong in (late, *(said(expected, values) for values in MOVED[name])):
        assert outside(carried, wrong)["rule"], "the target's rule itself has it"
        assert outside(carried, expected, wrong)["target"], "what the target holds has it"


def on_a_nan(
    carried: TrainState, expected: TrainState, actual: TrainState
) -> tuple[dict[str, int], list[str]]:
    """Returns the elements that leave a bound on gradients with a NaN, or of which it says nothing, and the notes."""
    sides = SideBySide(carried, expected, actual, ("statekit", "statekit"), Exactness.ROUNDING)
    replay, *_ = sides.run("adversarial", 1, NumpyBackend(), 0, True, lambda _: None)
    (row,) = [one for one in replay["probes"] if one["name"] == "a NaN"]
    return {**row["outside"], "undecided": row["undecided"]}, replay["notes"]


NO_ELEMENT = {"source": 0, "target": 0, "rule": 0, "undecided": 0}


def test_a_nan_reaches_its_own_elements_in_adamw_alone() -> None:
    state = adamw()
    assert on_a_nan(under("torch", state), under("optax", state), under("optax", state)) == (
        NO_ELEMENT,
        [
            "a NaN in each gradient makes 6 of 2304 elements NaN by the target's rule"
        ],  # of a parameter, its m and v
    )


def test_a_side_that_does_otherwise_with_a_nan_leaves_the_bound() -> None:
    spreads = adafactor()
    passes = said(spreads, {"skip_nan_updates": True})
    assert on_a_nan(spreads, spreads, spreads)[0] == NO_ELEMENT
    counts, notes = on_a_nan(passes, passes, passes)
    assert counts == NO_ELEMENT and notes == ["a NaN in each gradient is passed over, as both rules have it"]
    for right, wrong in ((spreads, passes), (passes, spreads)):
        assert on_a_nan(right, right, wrong)[0]["target"] > 0


@pytest.mark.torch
@pytest.mark.jax
def test_a_late_run_is_converted_and_back(tmp_path: Path) -> None:
    run = state_writer("torch", "torch-optim", adamw)(tmp_path)
    there, back = tmp_path / "ckpt", tmp_path / "back.pt"
    convert(plan(run, there, to="orbax", layout="optax"))
    convert(plan(there, back, to="torch", layout="torch-optim"))
    for source, target in ((run, there), (there, back)):
        made = verify(source, target, steps=1, gradients="random")
        assert made.passed, made.data["verdict"]["because"]
        assert made.verdict == "within the rounding bound"


@pytest.mark.parametrize(("number", "is_named"), [(0.5, False), (0.1, True)])
def test_a_number_of_a_group_in_another_width_is_a_cast_where_it_is_another_number(
    number: float, is_named: bool
) -> None:
    def of_group(dtype: type) -> TrainState:
        slots = {"threshold": in_memory(np.asarray(number, dtype), "threshold")}
        groups = tuple(replace(group, slots=slots) for group in adamw().optimizer.groups)
        return replace(adamw(), optimizer=replace(adamw().optimizer, groups=groups))

    def native(state: TrainState, updates: Any, rates: Any) -> TrainState:
        return of_group(np.float32)

    side = Side(of_group(np.float64), "a class", native)
    said_of = _as_loaded(side, side.after(NumpyBackend(), (), (1e-3,)))
    assert [*said_of] == [("groups/0", "threshold")] * is_named
    assert all("from float64 to float32" in line for line in said_of.values())


@pytest.mark.parametrize("variant", ["t2t_late", "t5x"])
def test_a_nan_goes_as_far_as_the_schema_says(variant: str) -> None:
    state, xp = under(variant, adafactor()), NumpyBackend()
    path = next(path for path, rule in state.rules.items() if rule.factored)
    grads = {name: np.full(param.shape, 1e-3, np.float32) for name, param in state.params.items()}
    grads[path].flat[0] = np.nan
    after = store(xp, mover(xp, state)(load(xp, state), grads, 1e-3), state)
    lost = {name: bool(np.isnan(slot.read()).all()) for name, slot in after.slots[path].items()}
    rules = load_schema("adafactor")
    spreads = rules.variant(variant)["constants"]["xla_perturbation"]
    assert lost == {"m": True, "v_col": spreads, "v_row": spreads}
    assert "where a gradient has a NaN" in rules.data["differences"]["xla_perturbation"]["meaning"]


def test_a_run_of_keras_adafactor_without_a_rate_is_stepped_with_one_that_is_said() -> None:
    """Its relative step only caps a rate: taken for one of its own, it left updates unproven."""
    for variant, rate in (("keras", 0.01), ("hf", None)):
        values = dict(load_schema("adafactor").variant(variant)["defaults"])
        del values["learning_rate"]
        assert values["relative_step"]
        group = Group((), values, dict.fromkeys(values, "given"))
        rates, notes = rates_of(TrainState({}, {}, Optimizer("adafactor", variant, (group,)), Counts(1, 1)))
        assert rates == (rate if rate is None else float(np.float32(rate)),)
        assert len(notes) == (rate is not None)


@pytest.mark.parametrize("at", [0, 1], ids=["loading", "updates"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_what_a_framework_raises_is_said_of_the_target_and_steps_no_source(
    side: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = failing_class(monkeypatch, TypeError("a raw error"), at)
    layouts = (failing, "statekit") if side == "source" else ("statekit", failing)
    state = adamw()
    sides = SideBySide(state, state, state, layouts, Exactness.ROUNDING)
    replay, verdicts, _ = sides.run("random", 1, NumpyBackend(), 0, False, lambda _: None)
    if side == "source":
        assert {verdict for verdict, _ in verdicts.values()} == {"bit-exact"}
        assert "TypeError: a raw error" in str(replay["notes"])
    else:
        assert {verdict for verdict, _ in verdicts.values()} == {"refuted"}
        assert all("TypeError: a raw error" in why for _, why in verdicts.values())


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device")], ids=repr)
def test_a_machine_that_fails_refutes_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    state = adamw()
    layouts = "statekit", failing_class(monkeypatch, error, 1)
    with pytest.raises(type(error)):
        SideBySide(state, state, state, layouts, Exactness.ROUNDING).run(
            "random", 1, NumpyBackend(), 0, False, lambda _: None
        )


def failing_class(monkeypatch: pytest.MonkeyPatch, error: Exception, at: int) -> str:
    """Returns a layout whose class raises an error once it makes so many updates; before, it changes nothing."""

    def run(state: TrainState, updates: Any, rates: Any) -> TrainState:
        if len(updates) >= at:
            raise error
        return state

    class Failing:
        name = title = "a class"
        missing = ()
        sqrt_units = 0.0
        execution = None

        def runner(self, schema: str, variant: str) -> Any:
            return run

    def class_of(layout: str, *kind: str) -> Any:
        return Failing() if layout == "failing" else None

    monkeypatch.setattr("statekit.verify.side_by_side.class_of", class_of)
    return "failing"
