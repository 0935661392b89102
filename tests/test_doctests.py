"""Every example in a docstring runs and gives what it says."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import pytest

import statekit

MODULES = sorted(module.name for module in pkgutil.walk_packages(statekit.__path__, "statekit."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0


def test_examples_are_found() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    module = import_module("statekit.cli.output")
    assert any(test.examples for test in finder.find(module))
