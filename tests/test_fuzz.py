"""Whatever a reader is given: a value or an error of ours, in time. A sample of what `make fuzz` does at length."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fuzz import findings, sweep, trees
from fuzz.changing import at, leads, put
from fuzz.reader import Reader
from fuzz.readers import FORMATS, READERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import ROWS

from statekit.errors import StatekitError

CASES = 100
"""Of each reader of a format."""
TREES = 12
"""Of each layout."""
DRAWN = 25
"""Of each reader of a format, by hypothesis, which makes small what it finds."""


@pytest.fixture(autouse=True)
def warnings_as_ever() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def hold(reader: Reader, case: Any) -> None:
    error = sweep.outcome(reader, case)
    if error is not None and not isinstance(error, StatekitError):
        raise AssertionError(f"{reader.name} read {sweep.shown(case)[:2000]}") from error


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_sample_is_read(reader: Reader) -> None:
    for sample in reader.samples():
        reader.read(sample)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_changed_sample_is_a_value_or_an_error_of_ours(reader: Reader) -> None:
    for number in range(CASES if reader in FORMATS else TREES):
        hold(reader, reader.case(Random(number)))


@pytest.mark.parametrize("reader", FORMATS, ids=lambda reader: str(reader.name))
def test_what_hypothesis_draws_is_a_value_or_an_error_of_ours(reader: Reader) -> None:
    @settings(
        max_examples=DRAWN,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def drawn(random: Random) -> None:
        hold(reader, reader.case(random))

    drawn()


@pytest.mark.parametrize(
    ("name", "data"), [(name, data) for name, every in findings.BYTES.items() for data in every]
)
def test_what_was_found_once_is_an_error_of_ours(name: str, data: bytes) -> None:
    with pytest.raises(StatekitError):
        READERS[name].read(data)


@pytest.mark.parametrize(
    ("sample", "layout", "path", "value"),
    findings.TREES,
    ids=[f"{layout} {'/'.join(map(str, path))}" for _, layout, path, _ in findings.TREES],
)
def test_what_was_found_once_in_a_tree_is_a_value_or_an_error_of_ours(
    sample: str, layout: str, path: tuple[Any, ...], value: Any
) -> None:
    fitting = [
        i for i, row in enumerate(ROWS) if sample in (row.name, row.sample.container) and row.layout == layout
    ]
    number = next((i for i in fitting if leads(trees.sample(i).tree, path)), None)
    if number is None:
        pytest.skip("the compact recordings have no such tree")
    hold(trees.READERS[number], put(trees.sample(number).tree, path, value))


@pytest.mark.parametrize(("layout", "target", "path", "value"), findings.PLANS)
def test_what_was_found_once_in_a_plan_is_a_value_or_an_error_of_ours(
    layout: str, target: str, path: tuple[Any, ...], value: Any
) -> None:
    """`...` stands for nothing: of what is missing from a tree."""
    fitting = (i for i, row in enumerate(ROWS) if row.layout == layout and row.write)
    number = next(i for i in fitting if leads(trees.sample(i).tree, path))
    tree = trees.sample(number).tree
    if value is ...:
        path, last = path[:-1], path[-1]
        value = {key: one for key, one in at(tree, path).items() if key != last}
    changed = put(tree, path, value(at(tree, path)) if callable(value) else value)
    hold(trees.PLAN, (number, target, changed))


BROKEN = """
import json
from fuzz import sweep
from fuzz.reader import Reader

def read(number):
    if number == 3:
        raise KeyError("lost")
    while number == 5:
        pass
    return number

numbers = iter(range(8))
sweep.SECONDS = 0.2
row = sweep.apart(Reader("broken", lambda: (0,), read, (lambda sample, random: next(numbers),)), range(8))
print(json.dumps([row.counts[:5], sorted(one.what for one in row.findings.values())]))
"""


def test_the_sweep_notices_what_is_no_error_of_ours() -> None:
    """In a process of its own: the sweep forks, which JAX' threads don't bear."""
    said = subprocess.run(
        [sys.executable, "-c", BROKEN], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert json.loads(said.stdout) == [[8, 0, 6, 1, 1], ["KeyError: 'lost'", "takes too long"]]
