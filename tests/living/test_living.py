"""Living originals: drawn runs of the libraries that install beside us, and our step beside each of their updates.

`make test` sees this sample; `make living` runs `sweep.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings

from living.cases import KINDS, cases, runs
from living.judging import faults
from living.originals import Case
from statekit.optim import adafactor_forms

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


@pytest.mark.jax
def test_a_rounded_product_is_seen_in_drawn_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled Optax rounds the sum of a bfloat16 momentum, not its product: the wrong constant of the schema."""
    rounded = {"rounded_op_by_op": adafactor_forms.MOMENTUM_PRODUCT["rounded"]}
    monkeypatch.setattr(adafactor_forms, "MOMENTUM_PRODUCT", {**adafactor_forms.MOMENTUM_PRODUCT, **rounded})
    seen: list[Case] = []

    @settings(
        max_examples=100,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases("optax", "adafactor", "compiled"))
    def search(case: Case) -> None:
        plain = replace(case, dtype="float32", drop_in=False, back=False, backend="numpy")
        ((arguments, _),) = case.groups
        low = arguments.get("dtype_momentum") == "bfloat16"
        if not seen and low and len(case.grads) > 1 and runs(plain) and faults(plain):
            seen.append(case)

    search()
    assert seen
