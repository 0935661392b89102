"""Importing statekit, and everything that only describes checkpoints, imports no framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from goldens import GOLDEN, bundles

FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "optax", "orbax", "tensorflow", "keras")
CASE = bundles("t5x")[0]
RUN = "from statekit.cli.main import main\nassert main({arguments!r}) == 0"


def imported(code: str) -> set[str]:
    """Runs code in a new interpreter and returns the frameworks it has imported."""
    report = f"import sys\nprint('\\nimported:', *(set({FRAMEWORKS}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], check=True, capture_output=True, text=True, timeout=120
    )
    return set(done.stdout.rpartition("imported:")[2].split())


def cli(*arguments: object) -> set[str]:
    """Runs the command line and returns the frameworks it has imported."""
    return imported(RUN.format(arguments=[str(a) for a in arguments]))


def test_the_check_sees_an_import() -> None:
    assert imported("import optax") >= {"optax", "jax"}


@pytest.mark.parametrize(
    "module",
    [
        "statekit",
        "statekit.conversion.inspection",
        "statekit.conversion.convert",
        "statekit.conversion.registry",
        "statekit.optim.adafactor",
    ],
)
def test_importing(module: str) -> None:
    assert imported(f"import {module}") == set()


def test_every_container_and_layout() -> None:
    assert cli("formats") == set()


def test_help() -> None:
    assert cli("--help") == set()


def test_help_does_not_even_import_numpy() -> None:
    code = RUN.format(arguments=["--help"]) + "\nimport sys\nassert 'numpy' not in sys.modules"
    assert imported(code) == set()


@pytest.mark.parametrize("folder", ["checkpoint", "checkpoint_orbax"])
def test_inspecting_a_t5x_checkpoint(folder: str) -> None:
    assert cli("inspect", "--stats", CASE / folder) == set()


def test_inspecting_a_network() -> None:
    assert cli("inspect", GOLDEN / "t5x_checkpoints" / "unscanned" / "msgpack_v3") == set()


@pytest.mark.torch
def test_inspecting_a_torch_file(tmp_path: Path) -> None:
    torch.save({"model": {"a.weight": torch.ones(3)}}, tmp_path / "model.pt")
    assert cli("inspect", "--stats", tmp_path / "model.pt") == set()


def test_converting_and_inspecting_the_result(tmp_path: Path) -> None:
    source = CASE / "checkpoint"
    assert cli("convert", source, tmp_path / "state", "--to", "statekit") == set()
    assert cli("convert", source, tmp_path / "state.pt") == set()
    assert cli("inspect", tmp_path / "state") == set()
    assert cli("inspect", tmp_path / "state.pt") == set()
