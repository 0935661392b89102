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
    assert doctest.testmod(import_module(name)).failed == 0


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
