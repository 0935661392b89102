"""Comparing two states: what one of them doesn't say is said to be so, and isn't a difference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from statekit.state.comparison import compare_states
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import in_memory


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
