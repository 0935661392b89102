"""JSON is parsed within limits that are ours: the same in every Python, whatever its own parser can take."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from statekit.errors import FormatError
from statekit.tensors.tree import MAX_DEPTH, loose_json, strict_json

PARSERS = [strict_json, loose_json]


def nested(levels: int) -> str:
    return '[{"a": ' * (levels // 2) + "[]" * (levels % 2) + "1" * (1 - levels % 2) + "}]" * (levels // 2)


@pytest.mark.parametrize("parse", PARSERS)
def test_what_nests_as_deep_as_a_checkpoint_may_is_read(parse: Callable[[str, object], Any]) -> None:
    for levels in (MAX_DEPTH, MAX_DEPTH - 1):
        assert json.dumps(parse(nested(levels), "here")) == nested(levels)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, MAX_DEPTH + 2, 5000, 200_000])
def test_what_nests_deeper_is_refused_with_the_limit(
    parse: Callable[[str, object], Any], levels: int
) -> None:
    with pytest.raises(FormatError, match=f"at most {MAX_DEPTH} levels"):
        parse(nested(levels), "here")


def test_only_the_loose_one_takes_what_python_writes_beyond_json() -> None:
    assert math.isnan(loose_json('{"loss": NaN}', "here")["loss"])
    with pytest.raises(FormatError, match="NaN isn't JSON"):
        strict_json('{"loss": NaN}', "here")
