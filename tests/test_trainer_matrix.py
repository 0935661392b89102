"""Every right resume of Trainer passes its callback, and each of six wrong ones raises what is wrong with it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

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


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
@pytest.mark.parametrize("model", ["full", "lora"])
def test_a_right_resume_passes_and_each_wrong_one_is_named(model: str, optim: str, tmp_path: Path) -> None:
    if model == "lora" and find_spec("peft") is None:
        pytest.skip("needs peft")
    cases = [{"model": model, "optim": optim, "schedule": schedule} for schedule in SCHEDULES]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    driver = Path(__file__).with_name("trainer_matrix_driving.py")
    done = subprocess.run([sys.executable, driver, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = {"right": [], **{way: [finding] for way, finding in WRONG.items()}}
    results = json.loads((tmp_path / "result.json").read_text())
    # Transformers' Adafactor keeps a parameter's RMS beside its slots, which goes wrong with them.
    first = [{way: names[:1] for way, names in result.items()} for result in results]
    assert dict(zip(SCHEDULES, first, strict=True)) == dict.fromkeys(SCHEDULES, expected)
