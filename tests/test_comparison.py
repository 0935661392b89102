"""Comparing two states: what one of them doesn't say is said to be so, and isn't a difference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from statekit.state.comparison import compare_states
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
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
