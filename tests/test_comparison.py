"""Comparing two states: what one of them doesn't say is said to be so, and isn't a difference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from statekit.attestation.diagnosis import diagnosed
from statekit.state.comparison import compare_states
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import in_memory
from statekit.tensors.tree import Tree


def state(counts: Counts, slots: bool = True) -> TrainState:
    zeros = in_memory(np.zeros(4, np.float32))
    return TrainState(
        {"w": in_memory(np.ones(4, np.float32))},
        {"w": {"m": zeros, "v": zeros}} if slots else {},
        Optimizer("adamw", "torch", (Group(("w",), {}),)),
        counts,
    )


def test_a_schedule_that_was_reset_differs_and_one_that_is_not_said_is_left_out() -> None:
    right, reset = state(Counts(3, 3)), state(Counts(3, 0))
    [one] = compare_states(right, reset).differences
    assert (one.what, one.place, one.expected, one.actual) == ("schedule", "schedule/count", 3, 0)
    silent = replace(right, counts=Counts(3, 3, says_schedule=False))
    for pair, side in (((silent, reset), "first"), ((reset, silent), "second")):
        compared = compare_states(*pair)
        assert compared.differences == ()
        assert compared.unsaid == (f"the schedule's count: the {side} doesn't say it",)
    assert compare_states(silent, right).unsaid == ()
    assert {one.what for one in compare_states(right, state(Counts(0, 0))).differences} == {"updates"}


def test_slots_that_are_not_made_yet_are_no_difference_where_values_are_not_read() -> None:
    made, bare = state(Counts(0, 0)), state(Counts(0, 0), slots=False)
    for pair in ((made, bare), (bare, made)):
        assert compare_states(*pair).differences == ()
        compared = compare_states(*pair, by_value=lambda path: False)
        assert compared.differences == ()
        assert "before the first update" in compared.unsaid[0]


def test_what_lies_beside_the_parameters_is_compared_by_value_or_said() -> None:
    def beside(total: float, step: int, **others: Tree) -> TrainState:
        parts: dict[str, Tree] = {"acc_grads": {"w": in_memory(np.full(2, total, np.float32))}, **others}
        parts["mini_step"] = in_memory(np.asarray(step, np.int32))
        return replace(state(Counts(3, 3)), extra={"optax": {"opt_state": parts}})

    right = beside(1.0, 2)
    assert compare_states(right, beside(1.0, 2)).differences == ()
    for other, name in ((beside(77.0, 2), "acc_grads/w"), (beside(1.0, 0), "mini_step")):
        [one] = compare_states(right, other).differences
        assert (one.what, one.place) == ("values", f"extra/optax/opt_state/{name}")
    more = compare_states(right, beside(1.0, 2, batch_stats=in_memory(np.ones(2))))
    assert more.differences == ()
    assert more.unsaid == ("extra/optax/opt_state/batch_stats: only the second has it",)


def test_every_record_of_a_kind_is_compared() -> None:
    def scaled(*scales: float) -> TrainState:
        parts: Tree = {str(i): {"scaler": {"scale": scale}} for i, scale in enumerate(scales)}
        return replace(state(Counts(3, 3)), extra={"torch": parts})

    assert compare_states(scaled(1.0, 2.0), scaled(1.0, 2.0)).differences == ()
    [one] = compare_states(scaled(1.0, 2.0), scaled(9.0, 2.0)).differences
    assert (one.what, one.expected) == ("part", {"scale": 1.0})


def test_options_are_alike_that_are_equal_off_or_one_in_float32_and_that_is_said() -> None:
    def options(slots: bool = True, **values: object) -> TrainState:
        bare = state(Counts(3, 3), slots)
        return replace(bare, optimizer=Optimizer("adamw", "torch", (Group(("w",), values),)))

    right = options(weight_decay_rate=None, epsilon=1e-8, nesterov=True)
    alike = options(weight_decay_rate=0.0, epsilon=float(np.float32(1e-8)), nesterov=True)
    compared = compare_states(right, alike)
    assert compared.differences == ()
    assert compared.normalised == (
        "weight_decay_rate: None and 0.0 both switch it off",
        "epsilon: 1e-08 and 9.99999993922529e-09 are equal as float32",
    )
    others = options(weight_decay_rate=0.01, epsilon=1.0000001e-8, nesterov=False)
    different = [one.item for one in compare_states(right, others).differences]
    assert different == ["weight_decay_rate", "epsilon", "nesterov"]


def test_another_word_for_off_is_a_difference_where_the_slot_is_there() -> None:
    def momentum(beta1: float | None, has: bool) -> TrainState:
        made = state(Counts(3, 3), slots=False)
        slots = {"w": {"v": made.params["w"], **({"m": made.params["w"]} if has else {})}}
        group = Group(("w",), {"beta1": beta1})
        rules = {"w": Rule((Axis.NONE,), "given")}
        return replace(made, slots=slots, rules=rules, optimizer=Optimizer("adafactor", "t5x", (group,)))

    assert compare_states(momentum(None, False), momentum(0.0, False)).differences == ()
    assert [one.what for one in compare_states(momentum(None, True), momentum(0.0, True)).differences] == [
        "option"
    ]


def test_groups_are_told_for_exchanged_by_options_as_float32_too() -> None:
    def grouped(rates: tuple[float, float]) -> TrainState:
        made = state(Counts(3, 3))
        groups = tuple(
            Group((path,), {"learning_rate": rate}) for path, rate in zip("wb", rates, strict=True)
        )
        params, slots = dict.fromkeys("wb", made.params["w"]), dict.fromkeys("wb", made.slots["w"])
        return replace(made, params=params, slots=slots, optimizer=Optimizer("adamw", "torch", groups))

    right, live = grouped((0.1, 0.3)), grouped((float(np.float32(0.3)), float(np.float32(0.1))))
    differences = compare_states(right, live).differences
    assert [one.name for one in diagnosed(right, live, differences)] == ["groups-exchanged"]
