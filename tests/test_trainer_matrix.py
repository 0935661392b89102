"""Every right resume of Trainer passes its callback, and each of six wrong ones raises what is wrong with it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]
SCHEDULES = (
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt",
)  # fmt: skip
WRONG = {
    "optimizer": "rule",
    "rate": "learning-rate",
    "moments": "slot-zero",
    "swapped": "slot-of-another-parameter",
    "decay": "hyperparameter",
    "count": "step",
}
"""What is wrong with a resume, and the finding that names it."""
UNDER_ZERO = {
    "right": [],
    **{way: [WRONG[way]] for way in ("rate", "moments", "decay", "count", "swapped")},
    "weights": ["parameter-differs"],
}
"""What is found under DeepSpeed, where the model's weights can also differ from the optimizer's masters."""


FORMS = ("full", "sharded")
"""How FSDP's states lie in Trainer's folder: one file of each, or a folder of shards."""


def driven(driver: str, folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, list[str]]]:
    """Returns what a driver finds of each case: by way to go on, the names of findings."""
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name(driver)
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, list[str]]] = json.loads((folder / "result.json").read_text())
    return results


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
@pytest.mark.parametrize("model", ["full", "lora", "sft"])
def test_a_right_resume_passes_and_each_wrong_one_is_named(model: str, optim: str, tmp_path: Path) -> None:
    needed = {"lora": ("peft",), "sft": ("peft", "trl", "datasets")}.get(model, ())
    if lacking := [name for name in needed if find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(lacking)}")
    # TRL's trainer makes its optimizer and its schedule as Trainer does: two schedules show its model and its rows.
    schedules = ("linear", "cosine") if model == "sft" else SCHEDULES
    cases = [{"model": model, "optim": optim, "schedule": schedule} for schedule in schedules]
    results = driven("trainer_matrix_driving.py", tmp_path, cases)
    expected = {"right": [], **{way: [finding] for way, finding in WRONG.items()}}
    # Transformers' Adafactor keeps a parameter's RMS beside its slots, which goes wrong with them.
    first = [{way: names[:1] for way, names in result.items()} for result in results]
    assert dict(zip(schedules, first, strict=True)) == dict.fromkeys(schedules, expected)


@pytest.mark.parametrize("form", FORMS)
def test_under_fsdp_a_right_resume_passes_and_each_wrong_one_is_named(form: str, tmp_path: Path) -> None:
    """Two processes hold shards, so that a swap shows as slots that differ."""
    cases = [{"form": form, "schedule": schedule} for schedule in SCHEDULES]
    results = driven("sharded_matrix_driving.py", tmp_path, cases)
    wrong = {way: {finding} for way, finding in WRONG.items() if way != "optimizer"}
    expected = {"right": set(), **wrong, "swapped": {"slot-differs"}}
    named = [{way: {*names} for way, names in result.items()} for result in results]
    assert dict(zip(SCHEDULES, named, strict=True)) == dict.fromkeys(SCHEDULES, expected)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_under_zero_a_right_resume_passes_and_each_wrong_one_is_named(stage: int, tmp_path: Path) -> None:
    """Seen red: ZeRO's optimizer moves flat pieces, and every right resume was stopped."""
    cases: list[dict[str, Any]] = [{"stage": stage, "schedule": schedule} for schedule in SCHEDULES]
    results = driven("zero_matrix_driving.py", tmp_path, cases)
    assert dict(zip(SCHEDULES, results, strict=True)) == dict.fromkeys(SCHEDULES, UNDER_ZERO)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("ranks", [1, 2])
def test_below_float32_the_masters_of_deepspeed_are_attested(ranks: int, tmp_path: Path) -> None:
    """Seen red: they were not attested, and without ZeRO every right resume was stopped."""
    cases: list[dict[str, Any]] = [
        *({"stage": stage, "dtype": dtype} for stage in range(4) for dtype in ("bf16", "fp16")),
        {"stage": 1, "dtype": "bf16", "summed": "fp32"},
        *({"stage": stage, "dtype": "bf16", "frozen": True} for stage in (1, 2, 3)),
    ]
    given = [{**case, "schedule": "linear", "ranks": ranks} for case in cases]
    results = driven("zero_matrix_driving.py", tmp_path, given)
    assert list(zip(cases, results, strict=True)) == [(case, UNDER_ZERO) for case in cases]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
def test_trainer_that_drives_deepspeed_itself_is_attested(optim: str, tmp_path: Path) -> None:
    """Seen red: Adafactor's mean of the first group stood for that of all, and stopped every right resume."""
    dtypes: tuple[dict[str, Any], ...] = ({}, {"dtype": "bf16"}) if optim == "adamw_torch" else ({},)
    cases = [{"stage": stage, **dtype} for stage in (1, 2, 3) for dtype in dtypes]
    given = [{**case, "schedule": "cosine", "optim": optim} for case in cases]
    results = driven("zero_matrix_driving.py", tmp_path, given)
    assert list(zip(cases, results, strict=True)) == [(case, UNDER_ZERO) for case in cases]
