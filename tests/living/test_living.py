"""Living originals: drawn runs of the libraries that install beside us, and our step beside each of their updates.

`make test` sees this sample; `make living` runs `sweep.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings

from living.cases import KINDS, cases, runs
from living.judging import faults
from living.originals import Case

SAMPLE = 4
"""Cases of each kind."""
MARKS = {"torch": "torch", "transformers": "torch", "optax": "jax", "keras": "tensorflow"}


def kinds() -> Iterator[Any]:
    for kind in KINDS:
        marks = [getattr(pytest.mark, MARKS[kind[0]])]
        if kind[2] == "compiled" and kind[0] != "optax":
            marks.append(pytest.mark.slow)
        yield pytest.param(*kind, id="-".join(kind), marks=marks)


@pytest.mark.parametrize(("library", "family", "mode"), list(kinds()))
def test_our_step_is_the_originals(library: str, family: str, mode: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} isn't installed")

    @settings(
        max_examples=SAMPLE,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(library, family, mode))
    def check(case: Case) -> None:
        assume(runs(case))
        assert faults(case) == [], case

    check()
