"""What is said of two rules, held against the rules in real arithmetic: equal where that is said, else apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from statekit.arrays.backend import Backend, Value
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.conversion import rule_change
from statekit.conversion.contracts import Exactness
from statekit.conversion.prepared import rule_change_to
from statekit.conversion.registry import LayoutCard
from statekit.conversion.rule_change import RuleChange, best_rule_change, change_rule
from statekit.errors import UsageError
from statekit.optim.run import STEPPED, load, mover, settled_group, steps_for
from statekit.state.constants import variant_constants
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Array, in_memory
from statekit.testing.step_cases import RATE, Case, case

NEAR = 1e-9
"""Relative: a thousand operations of float64 round to 1e-13; what two rules differ in here is above 1e-7."""
EDGE = {
    ("adafactor", "epsilon2"),  # no parameter here is that small
    ("adafactor", "lr_source"),  # fairseq's rate compounds from the second parameter on
}
"""Differences that some of the cases don't show."""


@dataclass(frozen=True)
class Real(NumpyBackend):
    """NumPy in float64 that rounds neither constants nor results: real arithmetic, as far as a test needs it."""

    compute: str = "float64"

    def constant(self, value: float, dtype: str = "float32") -> float:
        return value

    def narrow(self, value: Value, dtype: str) -> Value:
        return np.asarray(value).astype(self.compute)

    def rounded(self, value: Value, dtype: str) -> Value:
        return value

    def emulated(self, function: Callable[[Backend, Value], Value], value: Value, within: float) -> Value:
        return function(self, value)


REAL = Real()
Moved = Mapping[tuple[str, str], Array]


BESIDE_NORM = 2.0**60
"""What gradients of Muon are multiplied by: its epsilon counts only beside the norm of a matrix of almost nothing."""


@cache
def made(schema: str, variant: str, full: bool = False) -> Case:
    run = case(schema, variant, full=full)
    if schema != "muon":
        return run
    larger = [{path: grad * np.float32(BESIDE_NORM) for path, grad in grads.items()} for grads in run.grads]
    return replace(run, grads=tuple(larger))


def moved(state: TrainState, case: Case) -> Moved:
    """Returns params and slots after all updates of a case in real arithmetic."""
    live, move = load(REAL, state), mover(REAL, state, "compiled")
    for grads in case.grads:
        live = move(live, {path: np.asarray(grad, np.float64) for path, grad in grads.items()}, RATE)
    tensors_by_axes = {(path, "param"): param for path, param in live.params.items()}
    for path, tensors in live.slots.items():
        tensors_by_axes |= {
            (path, averaged(state.rules.get(path), name)): slot * multiple(state, name)
            for name, slot in tensors.items()
        }
    return tensors_by_axes


def multiple(state: TrainState, slot: str) -> float:
    """Returns what makes the mean of gradients of a slot that may be their sum."""
    form = variant_constants(state.optimizer.schema, str(state.optimizer.variant))
    is_sum = slot == "m" and form.get("momentum_buffer") == "sum"
    return 1.0 - float(state.optimizer.groups[0].hyperparameters["momentum"]) if is_sum else 1.0


def averaged(rule: Rule | None, slot: str) -> str:
    """Returns a slot's name, a factored one's with the axes that it has averaged away instead of row or column."""
    gone = {"v_row": Axis.COLUMN, "v_col": Axis.ROW}.get(slot)
    return slot if gone is None or rule is None else f"v averaged over {rule.dims(gone)}"


def apart(ours: Moved, theirs: Moved) -> list[tuple[str, str]]:
    """Returns what two rules make different."""
    both = ours.keys() & theirs.keys()
    return [*(ours.keys() ^ theirs.keys()), *(key for key in both if _far(ours[key], theirs[key]))]


def _far(left: Array, right: Array) -> bool:
    near = (np.abs(left - right) <= NEAR * np.abs(left)) | (np.isnan(left) & np.isnan(right))
    return left.shape != right.shape or not bool(np.all(near))


def pairs() -> Iterator[Any]:
    for schema in sorted(STEPPED):
        for source in load_schema(schema).stepped:
            for target in load_schema(schema).stepped:
                for full in (False, True) if source != target else ():
                    marks = [pytest.mark.slow] if full or schema == "scaled_adam" else []
                    yield pytest.param(schema, source, target, full, marks=marks)


@pytest.mark.sampled
@pytest.mark.parametrize(("schema", "source", "target", "full"), list(pairs()))
def test_what_is_said_to_be_equal_is(schema: str, source: str, target: str, full: bool) -> None:
    run = made(schema, source, full)
    way = change_rule(run.state, source, target)
    if way.exactness > Exactness.ROUNDING and full:
        return  # one of the many options given can't be had there: what it would do instead has no rule
    different = apart(moved(run.state, run), moved(way.state, run))
    if way.exactness <= Exactness.ROUNDING:
        assert not different, way
    elif schema != "scaled_adam":  # whose generations differ in what few updates reach
        worse = {(schema, one.what) for one in way.differences if one.exactness > Exactness.ROUNDING}
        assert different or worse & EDGE, way


@pytest.mark.parametrize(
    ("schema", "source", "target", "key"),
    [
        ("adamw", "torch", "keras", "epsilon_place"),
        ("adamw", "keras", "mesh_tf", "bias_correction"),
        ("adafactor", "torch", "hf", "epsilon1_place"),
        ("lans", "mxnet_fused", "apex_fused", "gradient_normalisation"),
    ],
)
def test_a_difference_that_is_called_none_is_noticed(
    schema: str, source: str, target: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = load_schema(schema)
    spec = {**real.data["differences"][key], "effect": "none"}
    data = {**real.data, "differences": {**real.data["differences"], key: spec}}
    monkeypatch.setattr(rule_change, "load_schema", lambda name: replace(real, data=data))
    run = made(schema, source)
    way = change_rule(run.state, source, target)
    assert key not in {one.what for one in way.differences}
    assert apart(moved(run.state, run), moved(way.state, run))


# One case each


def adafactor(
    variant: str, shape: tuple[int, ...] = (4, 8), updates: int = 9, **hyperparameters: Any
) -> TrainState:
    """Returns a state of one matrix, unfactored, as a variant has it unless told otherwise."""
    rng = np.random.default_rng(0)
    tensor = in_memory(rng.normal(size=shape).astype(np.float32))
    full = in_memory(rng.uniform(1, 2, size=shape).astype(np.float32))
    settings = {**load_schema("adafactor").variant(variant)["defaults"], **hyperparameters}
    return TrainState(
        params={"w": tensor},
        slots={"w": {"v": full}},
        rules={"w": Rule((Axis.NONE,) * len(shape), "file")},
        optimizer=optimizer_of(variant, settings),
        counts=Counts(updates, updates),
    )


def optimizer_of(variant: str, settings: Mapping[str, Any]) -> Optimizer:
    return Optimizer("adafactor", variant, (Group(("w",), settings, dict.fromkeys(settings, "given")),))


def worse(way: RuleChange) -> list[str]:
    return [one.what for one in way.differences if one.exactness > Exactness.ROUNDING]


def test_a_full_second_moment_stays_where_the_target_is_told_so_too() -> None:
    way = change_rule(adafactor("t5x", factored=False), "t5x", "t2t_late")
    assert [*way.state.slots["w"]] == ["v"] and not any("averaged" in str(one) for one in way.differences)
    assert [*change_rule(adafactor("t5x"), "t5x", "t2t_late").state.slots["w"]] == ["v_row", "v_col"]


def test_groups_whose_decays_begin_at_several_updates_have_no_one_count() -> None:
    one = adafactor("t5x", step_offset=5)
    way = change_rule(one, "t5x", "hf")
    assert way.state.counts.updates == 4 and not [d for d in way.differences if d.what == "step_offset"]
    params = dict.fromkeys(("w", "x"), one.params["w"])
    (group,) = one.optimizer.groups
    other = replace(group, paths=("x",), hyperparameters={**group.hyperparameters, "step_offset": 0})
    both = replace(
        one,
        params=params,
        slots=dict.fromkeys(params, one.slots["w"]),
        rules=dict.fromkeys(params, one.rules["w"]),
        optimizer=replace(one.optimizer, groups=(group, other)),
    )
    assert "step_offset" in worse(change_rule(both, "t5x", "hf"))


def test_an_offset_beyond_the_updates_is_refused_and_not_taken_off_the_count() -> None:
    with pytest.raises(UsageError, match="beyond the step"):
        change_rule(adafactor("t5x", step_offset=10), "t5x", "hf")


def test_a_rule_that_the_target_has_is_no_crossing() -> None:
    unknown = adafactor("t5x")
    unknown = replace(unknown, optimizer=replace(unknown.optimizer, variant=None))

    def changed(state: TrainState, source: str, *followed: str) -> bool:
        card = LayoutCard("other", "another layout", (), {"adafactor": followed})
        return rule_change_to(card, state, source) is not None

    assert changed(adafactor("t5x"), "t5x", "hf")
    assert not changed(adafactor("t5x"), "t5x", "hf", "t5x")
    assert changed(unknown, "t2t", "hf")
    assert not changed(unknown, "torch-optim", "keras", "hf")  # it may be Hugging Face's
    assert not changed(unknown, "mxnet-lans", "hf")  # nobody knows a candidate
    assert not changed(adafactor("t5x"), "t5x")  # the target holds no Adafactor


def test_the_nearest_of_several_rules_is_taken() -> None:
    state = adafactor("t5x", (8,))
    change = best_rule_change(state, ("t5x",), ("torch", "hf"))
    assert (change.target, change.exactness) == ("hf", Exactness.ROUNDING)
    group = change.state.optimizer.groups[0].hyperparameters
    assert (group["relative_step"], group["weight_decay_rate"], group["beta1"]) == (False, 0.0, None)


def test_a_full_second_moment_is_averaged_where_the_target_factors_everything() -> None:
    state = adafactor("t5x")
    way = change_rule(state, "t5x", "hf")
    full = state.slots["w"]["v"].read().astype(np.float64)
    slots = way.state.slots["w"]
    assert way.exactness == Exactness.STATISTICS
    np.testing.assert_array_equal(slots["v_row"].read(), full.mean(1).astype(np.float32))
    np.testing.assert_array_equal(slots["v_col"].read(), full.mean(0).astype(np.float32))
    assert way.state.rules["w"].axes == (Axis.ROW, Axis.COLUMN)


def test_a_square_matrix_gets_the_labels_of_the_target() -> None:
    state = made("adafactor", "t5x").state
    assert state.rules["square"].axes == (Axis.ROW, Axis.COLUMN)
    way = change_rule(state, "t5x", "mesh_tf")  # ties go to the first axis there
    assert way.state.rules["square"].axes == (Axis.COLUMN, Axis.ROW)
    assert way.state.slots["square"]["v_row"] is state.slots["square"]["v_col"]


def test_a_step_offset_is_taken_off_the_count_where_nothing_else_counts() -> None:
    way = change_rule(adafactor("t5x", (8,), step_offset=5), "t5x", "hf")
    assert (way.state.counts.updates, way.exactness) == (4, Exactness.ROUNDING)
    assert "step_offset is taken off the count" in way.compensated_by
    assert worse(change_rule(adafactor("t5x", (8,), step_offset=5), "t5x", "t2t_late")) == ["step_offset"]


def test_the_relative_step_is_a_capped_rate() -> None:
    way = change_rule(adafactor("hf", (8,)), "hf", "torch")
    group = way.state.optimizer.groups[0].hyperparameters
    assert (group["learning_rate"], group["epsilon1"], way.exactness) == (0.01, 1e-15, Exactness.ROUNDING)
    assert "warmup_init" in worse(change_rule(adafactor("hf", (8,), warmup_init=True), "hf", "torch"))


def test_t5x_multiplies_a_decay_by_the_rate_where_it_is_told_to() -> None:
    """As HF's Adafactor without a parameter scale does: equal in real arithmetic, there and back."""
    settings: dict[str, Any] = {"weight_decay_rate": 0.1, "multiply_by_parameter_scale": False}
    settings |= {"relative_step": False}
    settings |= {"clipping_threshold": None}  # of stacked parameters it is another thing in T5X
    run = made("adafactor", "hf")
    state = _with(run.state, **settings, learning_rate=RATE)
    there = change_rule(state, "hf", "t5x")
    assert there.exactness == Exactness.ROUNDING
    assert there.state.optimizer.groups[0].hyperparameters["weight_decay_rate_lr_exponent"] == 1.0
    assert apart(moved(there.state, run), moved(state, run)) == []
    back = change_rule(there.state, "t5x", "hf")  # which factors all that T5X was told not to
    assert all(what.startswith("v of ") for what in worse(back))
    assert back.state.optimizer.groups[0].hyperparameters["weight_decay_rate"] == 0.1
    without = change_rule(_with(state, weight_decay_rate=0.0), "hf", "t5x").state
    assert without.optimizer.groups[0].hyperparameters["weight_decay_rate_lr_exponent"] is None
    scaled = change_rule(_with(state, multiply_by_parameter_scale=True), "hf", "t5x")
    assert scaled.exactness == Exactness.STATISTICS  # the size of the decay is the run's, up to the scale
    assert scaled.state.optimizer.groups[0].hyperparameters["weight_decay_rate_lr_exponent"] == 1.0


def test_a_decay_that_the_target_multiplies_by_no_rate_has_the_size_of_this_update() -> None:
    run = _with(made("adafactor", "hf").state, weight_decay_rate=0.1, learning_rate=0.01, relative_step=False)
    optax = change_rule(run, "hf", "optax")
    [group] = optax.state.optimizer.groups
    assert (
        optax.exactness == Exactness.STATISTICS and group.hyperparameters["weight_decay_rate"] == 0.1 * 0.01
    )
    [back] = change_rule(optax.state, "optax", "hf").state.optimizer.groups
    assert back.hyperparameters["weight_decay_rate"] == pytest.approx(0.1)
    [unknown] = change_rule(_with(run, learning_rate=None), "hf", "optax").state.optimizer.groups
    assert "weight_decay_rate" not in unknown.hyperparameters


def _with(state: TrainState, **settings: Any) -> TrainState:
    groups = tuple(
        replace(group, hyperparameters={**group.hyperparameters, **settings})
        for group in state.optimizer.groups
    )
    return replace(state, optimizer=replace(state.optimizer, groups=groups))


def test_parameters_kept_from_decay_by_name_become_a_group() -> None:
    state = adafactor("t5x", (8,))
    settings = {
        **load_schema("adamw").variant("gpt_neo")["defaults"],
        "weight_decay_rate": 0.1,
        "exclude_from_weight_decay": ["bias"],
    }
    both = {"w": state.params["w"], "bias": state.params["w"]}
    group = Group(("w", "bias"), settings, dict.fromkeys(settings, "given"))
    adam = TrainState(both, {}, Optimizer("adamw", "gpt_neo", (group,)), Counts(1, 1))
    way = change_rule(adam, "gpt_neo", "torch")
    decays = [(g.paths, g.hyperparameters["weight_decay_rate"]) for g in way.state.optimizer.groups]
    assert decays == [(("w",), 0.1), (("bias",), 0.0)]
    assert "exclude_from_weight_decay" not in worse(way)


EXCLUSIONS: Mapping[str, Any] = {
    "gpt_neo": ["norm", "bias"],
    "keras": ["norm", "bias"],
    "mesh_tf": ["norm"],
    "optax": {"enc/norm/scale": True, "enc/bias": False, "enc/mlp/bias": True, "enc/mlp/w": False},
}
"""What isn't decayed, by variants that say it by the whole name, by its last part, or by a mask."""


def decays(state: TrainState) -> dict[str, float | None]:
    """Returns the weight decay of each parameter's next update; None where there is none."""
    schema, variant = state.optimizer.schema, str(state.optimizer.variant)
    each = (settled_group(steps_for(schema, variant), g, {}, variant) for g in state.optimizer.groups)
    settled: dict[str, Any] = {path: one for configs in each for path, one in configs.items()}
    return {path: one.weight_decay_rate or None for path, one in settled.items()}


@pytest.mark.parametrize("target", [*EXCLUSIONS, "torch"])
@pytest.mark.parametrize("source", EXCLUSIONS)
def test_what_is_kept_from_decay_stays_so_however_the_target_says_it(source: str, target: str) -> None:
    settings = {
        **load_schema("adamw").variant(source)["defaults"],
        "weight_decay_rate": 0.1,
        "exclude_from_weight_decay": EXCLUSIONS[source],
    }
    weight = in_memory(np.ones(2, np.float32))
    paths = tuple(EXCLUSIONS["optax"])
    group = Group(paths, settings, dict.fromkeys(settings, "given"))
    state = TrainState(dict.fromkeys(paths, weight), {}, Optimizer("adamw", source, (group,)), Counts(1, 1))
    way = change_rule(state, source, target)
    if "exclude_from_weight_decay" in worse(way):
        # The last part of a name can't tell one bias from the other.
        assert (source, target) == ("optax", "keras")
        assert decays(way.state) == {**decays(state), "enc/mlp/bias": 0.1}
    else:
        assert decays(way.state) == decays(state)


def test_unknown_hyperparameters_stop_nothing() -> None:
    state = adafactor("t5x", (8,))
    bare = replace(state, optimizer=replace(state.optimizer, groups=(Group(("w",)),)))
    way = change_rule(bare, "t5x", "hf")
    assert way.exactness == Exactness.ROUNDING
    group = way.state.optimizer.groups[0]
    assert (group.hyperparameters["decay_rate"], group.known_from["decay_rate"]) == (0.8, "assumed")
    assert group.hyperparameters.get("learning_rate") is None
    assert "decay_rate" in way.state.assumptions[-1]


def test_a_number_that_the_target_has_as_float32_is_rounding_and_another_is_not() -> None:
    assert "epsilon2" not in load_schema("adafactor").variant("optax")["defaults"]
    fixed = load_schema("adafactor").settings("optax")["epsilon2"]
    for value, expected in (
        (float(np.float32(fixed)), Exactness.ROUNDING),
        (2 * fixed, Exactness.STATISTICS),
    ):
        state = adafactor("t5x", (8, 8)).with_hyperparameters(epsilon2=value)
        (one,) = [one for one in change_rule(state, "t5x", "optax").differences if one.what == "epsilon2"]
        assert one.exactness is expected


def test_every_effect_has_an_exactness() -> None:
    for schema in map(load_schema, STEPPED):
        for spec in (*schema.hyperparameters.values(), *schema.data["differences"].values()):
            assert spec["effect"] in rule_change.EFFECTS
