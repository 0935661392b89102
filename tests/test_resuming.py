"""Each target's own library goes on by the printed lines, saves, and loads that again: as docs/resuming.md says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import resuming
import resuming_table

from statekit.conversion import registry, resume

PUBLISHED: list[dict[str, Any]] = json.loads(resuming_table.RESULTS.read_text(encoding="utf-8"))
SAMPLE = (
    "keras-h5/keras/functional",
    "tf-bundle/tf2-statekit/sequential",
    "torch/torch-optim/tied and frozen",
    "torch/torch-optim/two of AdamW, two schedules",
    "accelerate/statekit-torch/two optimizers, one schedule",
    "dcp-safetensors/torch-fqn-flat/adafactor",
    "orbax/optax/tree",
)
"""Cells without Lightning and Transformers, each of which takes seconds to import: test_lightning_target.py and
test_trainer_goes_on.py go on in them."""
pytestmark = [pytest.mark.torch, pytest.mark.jax, pytest.mark.tensorflow]


def run_here() -> list[dict[str, Any]]:
    """Returns the rows that this environment made; others say when and with what they were run by hand."""
    return [one for one in PUBLISHED if "by_hand" not in one]


def came_of(results: list[dict[str, Any]]) -> dict[str, tuple[bool, ...]]:
    return {
        f"{one['container']}/{one['layout']}/{one['model']}": tuple(one[step] for step in resuming.STEPS)
        for one in results
    }


def alarms(results: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Returns what `attest` found in runs that were loaded rightly, by cell."""
    rows = [(one, what, each) for one in results for what, each in one["attested"].items() if each]
    return {f"{one['container']}/{one['layout']}/{one['model']}: {what}": each for one, what, each in rows}


def test_the_page_says_what_was_run() -> None:
    assert resuming_table.TARGET.read_text(encoding="utf-8") == resuming_table.page(PUBLISHED), (
        "`make tables`"
    )
    assert list(came_of(run_here())) == resuming.CELLS
    assert alarms(run_here()) == {}
    for one in PUBLISHED:
        assert one["container"] in registry.layout_card(one["layout"]).containers


def test_a_sample_goes_on_by_the_printed_lines_and_through_its_next_save(tmp_path: Path) -> None:
    results = resuming_table.run(tmp_path / "runs", SAMPLE)
    assert {one.get("error") for one in results} == {None}
    assert alarms(results) == {}
    published = came_of(run_here())
    assert came_of(results) == {cell: published[cell] for cell in SAMPLE}


@pytest.mark.slow
def test_every_cell_is_as_published(tmp_path: Path) -> None:
    results = resuming_table.run(tmp_path / "runs")
    assert came_of(results) == came_of(run_here())
    assert alarms(results) == {}


@pytest.mark.parametrize("spoiled", ["optimizer.load_state_dict(", "model.load_state_dict("])
def test_a_line_that_is_missing_is_seen(
    spoiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = resume.resume_lines

    def without(*said: Any) -> list[str]:
        lines = whole(*said)
        assert any(line.startswith(spoiled) for line in lines)
        return [line for line in lines if not line.startswith(spoiled)]

    monkeypatch.setattr(resume, "resume_lines", without)
    result = resuming.run_cell("torch/torch-optim/module", tmp_path / "run")
    assert result["loads"] is (spoiled == "optimizer.load_state_dict(")
    assert not result["goes_on"]
