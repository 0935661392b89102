"""Foreign records held to declared types: what fits passes as it is, everything else is named with its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import pytest

from statekit.errors import FormatError, StateError
from statekit.tensors.tensor import Tensor, in_memory
from statekit.tensors.tree import Record
from statekit.tensors.typed import Finite, Name, Natural, fits, misfits, typed

ZEROS = in_memory(np.zeros(2, np.float32))


class Group(TypedDict):
    lr: float
    betas: NotRequired[tuple[float, float]]
    mode: NotRequired[Literal["sum", "mean"] | None]


class Run(TypedDict, total=False):
    groups: list[Group]
    step: Natural
    names: dict[Name, Tensor]


FITTING: list[tuple[Any, Any]] = [
    ({}, Run),
    ({"groups": [{"lr": 1, "betas": (0.9, 0.99), "more": object()}], "step": 0}, Run),
    ({"groups": [{"lr": 0.5, "betas": [0.9, 1], "mode": None}]}, Run),
    ({"names": {"w": ZEROS}}, Run),
    ([1, (2, "a")], list[int | tuple[int, str]]),
    ((1.5, float("inf")), Sequence[float]),
    ({1: None, "a": b""}, dict[int | str, bytes | None]),
    (Record("a.B"), Record),
]
MISFITTING: list[tuple[Any, Any, list[tuple[str, str]]]] = [
    (5, Run, [("is 5, expected a map", "the top")]),
    ({"step": True}, Run, [("is True, expected a whole number from 0 on", "step")]),
    ({"step": -1}, Run, [("is -1, expected a whole number from 0 on", "step")]),
    ({"groups": [{}]}, Run, [("is missing, expected a number", "groups/0/lr")]),
    ({"groups": [{"lr": "0.1"}, 3]}, Run, [("is '0.1', expected a number", "groups/0/lr"),
    ("is 3, expected a map", "groups/1")]),
    ({"groups": [{"lr": 1, "mode": "max"}]}, Run,
    [("is 'max', expected 'sum' or 'mean' or nothing", "groups/0/mode")]),
    ({"names": {"\ud800": ZEROS}}, Run, [("has the key '\\ud800', expected text in Unicode", "names")]),
    ({"names": {"w": [1]}}, Run, [("is a list, expected a tensor", "names/w")]),
    ([1, 2**2000], list[float], [("is a huge number, expected a number", "1")]),
    ([float("nan")], list[Finite], [("is nan, expected a finite number", "0")]),
    ({"a": ZEROS}, dict[str, str], [("is a tensor of shape (2,), expected text", "a")]),
    (Record("evil\x1b.B"), str, [("is an object of evil\\x1b.B, expected text", "the top")]),
    ("ab", Sequence[str], [("is 'ab', expected a list of texts", "the top")]),
]  # fmt: skip


@pytest.mark.parametrize(("value", "kind"), FITTING)
def test_what_is_of_its_type_passes_as_it_is(value: Any, kind: Any) -> None:
    assert fits(value, kind)
    assert typed(value, kind, "place") is value


@pytest.mark.parametrize(("value", "kind", "faults"), MISFITTING)
def test_every_place_where_something_else_stands_is_named(
    value: Any, kind: Any, faults: list[tuple[str, str]]
) -> None:
    assert list(misfits(value, kind)) == faults
    assert not fits(value, kind)
    with pytest.raises(FormatError) as refusal:
        typed(value, kind, "the file")
    assert refusal.value.faults == tuple(faults)
    assert refusal.value.place == "the file"


def test_the_error_is_of_the_class_that_was_asked_for() -> None:
    with pytest.raises(StateError, match="No state"):
        typed([], dict[str, int], "here", "No state", StateError)


def test_a_type_that_cannot_be_checked_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match="can't be checked"):
        fits(1, complex)
