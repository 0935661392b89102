"""From which step a run can go on, and which steps nobody needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from statekit.service.standing import Rule, fault_of, spare_of, standing


def step(number: int, **known: Any) -> SimpleNamespace:
    usual = {
        "unreadable": None,
        "undecoded": None,
        "seal": "sealed",
        "verdict": "clean",
        "resumable": True,
        "size": 10,
    }
    return SimpleNamespace(id=100 + number, step=number, **usual | known)


def test_the_newest_good_step_is_where_a_run_goes_on() -> None:
    stands = standing([step(1), step(2, verdict=None), step(3, verdict="findings")], ())
    assert (stands.good, stands.good_step, stands.examined) == (102, 2, False)
    assert stands.why == "doctor found faults in its values"


def test_the_last_three_good_steps_and_tagged_ones_are_kept() -> None:
    steps = [
        step(1),
        step(2, unreadable="cut off"),
        step(3),
        step(4),
        step(5, seal="damaged"),
        step(6),
        step(7),
    ]
    assert (standing(steps, ()).spare, standing(steps, ()).spare_size) == (
        3,
        30,
    )  # 4, 6, 7 and the bad 5 stay
    assert standing(steps, {101}).spare == 2
    assert standing(steps[:5], ()).spare == 0  # 1, 3, 4


@pytest.mark.parametrize(
    ("rule", "spare"),
    [(Rule(), [1, 2, 3, 4]), (Rule(last=1), [1, 2, 3, 4, 5, 6]), (Rule(1, 3), [1, 2, 4, 5]), (Rule(9), [])],
)
def test_a_rule_keeps_the_last_good_steps_and_multiples(rule: Rule, spare: list[int]) -> None:
    steps = [step(number) for number in range(1, 8)]
    assert [one.step for one in spare_of(steps, (), rule)] == spare


def test_nothing_is_spare_where_no_step_is_good() -> None:
    stands = standing([step(number, resumable=False) for number in range(9)], ())
    assert (stands.good, stands.spare, stands.why) == (None, 0, "it holds no optimizer's state")


@pytest.mark.parametrize(
    "known", [{"unreadable": "x"}, {"seal": "changed"}, {"verdict": "findings"}, {"resumable": False}]
)
def test_a_fault_has_a_reason(known: dict[str, Any]) -> None:
    assert fault_of(step(1, **known)) and not fault_of(step(1, verdict=None, seal="unsealed"))
