"""Folders that Transformers' Trainer itself goes on from, saves again, and goes on from that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import drivers
import numpy as np
import pytest
from test_hf_folders import made
from torch_files import save

from goldens import GOLDEN
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.resume import of_plan, resume_lines
from statekit.errors import UnknownRuleError
from statekit.tensors.tensor import in_memory

pytestmark = pytest.mark.torch
T5X = GOLDEN / "t5x" / "noscale_wd_noclip" / "checkpoint"
RATE = Hints({"learning_rate": 0.1}, assume_defaults=True)
GROUPS = (("a.w", "b.w"), ("a.bias", "b.bias"))
NAMES = {"a.w": (3, 4), "a.bias": (3,), "b.w": (2, 3), "b.bias": (2,)}


def driven(work: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Runs trainer_driving.py, and returns what it found."""
    (work / "case.json").write_text(json.dumps(case))
    script = Path(__file__).with_name("trainer_driving.py")
    done = drivers.run(script, work, imports=["transformers.trainer", "statekit.torch"])
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads((work / "result.json").read_text())
    return result


def sources(folder: Path) -> dict[str, Path]:
    """Writes or names checkpoints that no Trainer wrote."""
    two_groups = made(NAMES, GROUPS)
    two_groups["optimizer"]["param_groups"][1]["weight_decay"] = 0.01
    for slots in two_groups["optimizer"]["state"].values():
        slots["exp_avg_sq"] = in_memory(slots["exp_avg"].read() ** 2)
    for group, names in zip(two_groups["optimizer"]["param_groups"], GROUPS, strict=True):
        group["param_names"] = list(names)
    return {
        "t5x": T5X,
        "torch": save(folder / "two_groups.pt", two_groups),
    }


def test_trainer_goes_on_saves_and_goes_on_from_that(tmp_path: Path) -> None:
    folders = {}
    for name, source in sources(tmp_path).items():
        report = convert(plan(source, tmp_path / name, to="hf-trainer", hints=RATE))
        [folders[name]] = (str(path) for path in (tmp_path / name).glob("checkpoint-*"))
        assert any("500" in said and "save_steps" in said for said in report.plan.assumptions), name
    lines = resume_lines(of_plan(report.plan, report.files), report.plan.state)
    results = driven(tmp_path, {**folders, "lines": lines})
    assert results.pop("printed") == [1, 3]
    assert results.pop("documented") == {"saved": [1, 3, 5], "logged": [1, 2, 3, 4, 5], "seen": 5}
    for name, result in results.items():
        first = int(folders[name].rpartition("-")[2])
        assert result["steps"] == [first + 3, first + 6], name
        assert {*result["saved"]} == {f"checkpoint-{first + 3}", f"checkpoint-{first + 6}"}, name
        assert result["control"]["args"]["should_save"] is True, name
        for path, values in result["expected"].items():
            assert np.array_equal(result["weights"][path], values), (name, path)


def test_a_learning_rate_that_trainer_cannot_do_without_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(
        UnknownRuleError, match=r"expected: learning_rate\n(.|\n)*--hparams learning_rate=\.\.\."
    ):
        plan(T5X, tmp_path / "run", to="hf-trainer", hints=Hints(assume_defaults=True))
    convert(plan(T5X, tmp_path / "run", to="hf-trainer", hints=RATE))
