"""T5s that T5X trained go on in Hugging Face's as T5X went on: the recorded logits, losses and weights follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import drivers
import pytest

from goldens import GOLDEN

pytestmark = pytest.mark.torch

CASES = {"t5_10_tied": "t5", "t5_11_unscanned": "t5", "t5_11_scanned": "umt5"}
"""Recordings, each with the model of Hugging Face's that can hold it; one of them is in the compact set."""
LOGITS, LOSS, WEIGHTS = 1e-5, 2e-6, 2e-4
"""The most that logits may differ, per their largest; a loss, relatively; a tensor, per its movement.

T5X itself, compiled without optimization, comes to 4.6e-7 for losses and 1.8e-5 for weights; ten mistakes in a
conversion exceed both limits, the smallest by six times.
"""


HERE = [case for case in CASES if (GOLDEN / "t5x_train" / case).is_dir()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, script = tmp_path_factory.mktemp("t5"), Path(__file__).with_name("t5_driving.py")
    said = [f"{CASES[case]}={GOLDEN / 't5x_train' / case}" for case in HERE]
    done = drivers.run(script, folder, *said, imports=["transformers.trainer", "statekit.torch"])
    assert done.returncode == 0, done.stderr[-4000:]
    return {case: json.loads((folder / case / "result.json").read_text()) for case in HERE}


@pytest.fixture(params=HERE)
def result(request: pytest.FixtureRequest, results: dict[str, Any]) -> Any:
    return results[request.param]


def test_every_tensor_is_carried_to_the_bit_and_the_model_gives_the_recorded_logits(result: Any) -> None:
    assert result["exactness"] == "BITWISE"
    assert result["logits"] <= LOGITS


@pytest.mark.parametrize("way", ["converted", "straight"])
def test_training_goes_on_as_it_did_in_t5x(result: Any, way: str) -> None:
    assert result[way]["loss"] <= LOSS
    assert result[way]["weights"] <= WEIGHTS


def test_a_folder_loads_by_itself_and_trainer_goes_on_from_it_by_the_printed_lines_through_its_next_save(
    result: Any,
) -> None:
    folder = result["trainer"]
    assert (folder["layout"], folder["passed_over"]) == ("statekit-torch", ["torch-optim"])
    assert folder["logits"] <= LOGITS
    assert folder["loss"] <= LOSS
    assert folder["weights"] <= WEIGHTS


def test_the_rate_of_the_first_update_comes_from_the_printed_lines(result: Any) -> None:
    rates = result["trainer"]["rates"]  # without the lines, the first update takes that of update 1
    assert (result["trainer"]["without the rate"] > LOSS) is (rates[8] != rates[0])


def test_a_head_that_umt5_would_scale_is_told_after_loading(result: Any) -> None:
    untied_umt5 = any("/block/1/layer/0/SelfAttention/relative" in one["target"] for one in result["mapped"])
    assert (result["trainer"]["without the line after loading"] > LOGITS) is untied_umt5


def test_a_head_of_its_own_doesnt_go_into_a_model_that_ties_it(result: Any) -> None:
    apart = any(one["target"] == "lm_head/weight" for one in result["mapped"])
    assert ("is one tensor with" in result["tied"]) is apart
    assert apart or result["tied"] == "loaded"


@pytest.mark.parametrize("mistake", ["swapped", "permuted", "cold"])
def test_mistakes_with_the_slots_are_noticed(result: Any, mistake: str) -> None:
    assert result[mistake]["loss"] > LOSS
    assert result[mistake]["weights"] > WEIGHTS
