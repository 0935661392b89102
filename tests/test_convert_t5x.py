"""Runs that T5X itself wrote go through the neutral folder and come back bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats import register, values
from goldens import GOLDEN, bundles
from statekit.conversion.contracts import Exactness
from statekit.conversion.convert import Report, convert, plan
from statekit.conversion.open_state import open_state
from statekit.converters.containers.orbax.container import CONTAINER as ORBAX
from statekit.converters.containers.t5x import CONTAINER as T5X
from statekit.converters.layouts.t5x.layout import LAYOUT

BUNDLES = [bundle.name for bundle in bundles("t5x")]
WRITTEN = [
    path.relative_to(GOLDEN).as_posix()
    for path in sorted((GOLDEN / "t5x_checkpoints").rglob("checkpoint_*"))
    if path.is_dir() or path.stat().st_size > 10_000
]


@pytest.fixture(autouse=True)
def formats(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, T5X, ORBAX, LAYOUT)


def same(left: Path, right: Path) -> None:
    with open_state(left) as first, open_state(right) as second:
        assert values(first.checkpoint.tensors) == values(second.checkpoint.tensors)
        assert first.state.counts == second.state.counts
        assert first.state.optimizer == second.state.optimizer
        assert first.state.rules == second.state.rules


def through(source: Path, folder: Path, back: str) -> Report:
    """Converts to the neutral folder and back, compares, and returns the report of the first conversion."""
    there = plan(source, folder / "neutral-statekit")
    assert there.exactness is Exactness.BITWISE and not there.dropped
    report = convert(there)
    returned = convert(plan(folder / "neutral-statekit", folder / "checkpoint_back", to=back))
    assert returned.source_proven == report.verified
    same(source, folder / "checkpoint_back")
    return report


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", BUNDLES)
def test_a_recorded_run_comes_back(tmp_path: Path, name: str) -> None:
    digests = set()
    for generation, back in (("checkpoint", "t5x"), ("checkpoint_orbax", "t5x-orbax")):
        (tmp_path / generation).mkdir()
        digests.add(through(GOLDEN / "t5x" / name / generation, tmp_path / generation, back).source_digest)
    assert len(digests) == 1  # both generations hold the same values


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_checkpoint_of_every_generation_comes_back(tmp_path: Path, name: str) -> None:
    through(GOLDEN / name, tmp_path, "t5x")


def test_one_generation_becomes_the_other(tmp_path: Path) -> None:
    source = GOLDEN / "t5x" / BUNDLES[0] / "checkpoint"
    convert(plan(source, tmp_path / "t5x-orbax"))
    convert(plan(tmp_path / "t5x-orbax", tmp_path / "t5x-ckpt"))
    for name, container in (("t5x-orbax", "orbax"), ("t5x-ckpt", "t5x")):
        with open_state(tmp_path / name) as opened:
            assert (opened.checkpoint.container, opened.layout) == (container, "t5x")
        same(source, tmp_path / name)
