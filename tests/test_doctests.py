"""Every example in a docstring runs and gives what it says."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest

import statekit
from goldens import GOLDEN

MODULES = sorted(module.name for module in pkgutil.walk_packages(statekit.__path__, "statekit."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module, runner = import_module(name), doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(module):
        if test.examples:  # a run without one asks of every file that Python has read whether it has changed
            runner.run(test)
    assert runner.failures == 0


def test_an_example_that_is_wrong_is_noticed() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "sum", None, None)
    runner = doctest.DocTestRunner()
    runner.run(wrong, out=lambda text: None)
    assert runner.failures == 1


def test_the_front_doors_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = GOLDEN / "t5x" / "momentum_f32"
    (tmp_path / "t5x-ckpt").symlink_to(case / "checkpoint")
    (tmp_path / "recording").symlink_to(case)
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(statekit)
    assert result.failed == 0
    assert result.attempted >= 10


def test_examples_are_found() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    module = import_module("statekit.cli.output")
    assert any(test.examples for test in finder.find(module))
