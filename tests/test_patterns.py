"""Patterns that a checkpoint names: a match takes bounded time, or is refused."""

from __future__ import annotations

import time

import pytest

from statekit.budget import Account
from statekit.converters.containers.deepspeed.joins import Joins
from statekit.errors import StateError, StatekitError
from statekit.state.hyperparameters import IS_EXCLUDED
from statekit.tensors.patterns import is_found

NAME = "a" * 60
ENDLESS = [
    "^(a+)+$",
    "a?" * 60 + "a" * 60,
    "(a|aa|ab)" * 25 + "c",
    "(|a)" * 60 + "b",
    r"\(?" * 40 + r"\(" * 40,
    ".*" * 20 + "b",
    "(?:a?){40}b",
]


@pytest.mark.parametrize("pattern", ENDLESS)
def test_a_pattern_that_may_take_time_without_end_is_refused_at_once(pattern: str) -> None:
    """Seen red: all hung, or the first did where weight decay was asked for, and the second in DeepSpeed's joins."""
    began = time.process_time()
    name = "(" * 60 if "\\" in pattern else NAME
    with pytest.raises(StateError, match="matched safely"):
        is_found(pattern, name, "here")
    with pytest.raises(StateError, match="exclude_from_weight_decay"):
        IS_EXCLUDED["name_regex"](name, [pattern])
    joins = Joins({"tp_replicated_parameter_patterns": [pattern]}, "run", Account())
    with pytest.raises(StatekitError):
        joins._names("tp_replicated_parameter_patterns", name)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("value", [5, [5], ["("], [None], ["a" * 300]])
def test_what_is_no_pattern_is_refused(value: object) -> None:
    with pytest.raises(StateError):
        IS_EXCLUDED["name_regex"](NAME, value)  # type: ignore[arg-type]  # as a file has it


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("bias", "encoder/bias", True),
        ("(^|/)(bias|scale)$", "encoder/layer_norm/scale", True),
        (r".*layers_\d+/.*norm", "decoder/layers_11/pre_norm/scale", True),
        ("(?i)LayerNorm|layer_norm|bias|scale|rms_norm|embedding|pos|cls|gamma|beta", "x/kernel", False),
        ("^(?!.*bias)", "x/kernel", True),
    ],
)
def test_a_pattern_as_people_write_it_is_searched(pattern: str, name: str, found: bool) -> None:
    assert is_found(pattern, name, "here") == found
