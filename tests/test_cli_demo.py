"""`statekit demo`: what `make demo` shows is true, and would be noticed if it weren't."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from goldens import bundles
from statekit.cli.main import DONE, FAILED, WANTING, main
from statekit.torch import Adafactor

pytestmark = pytest.mark.torch
CASES = {path.name: path for path in bundles("t5x")}


def demo(tmp_path: Path, case: str) -> int:
    return main(["demo", str(CASES[case]), "--out", str(tmp_path / "out")])


@pytest.mark.parametrize("case", ["momentum_f32", "finetune_step_offset", "bf16_params", "multi_optimizer"])
def test_a_t5x_run_goes_on_in_pytorch(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(tmp_path, case) == DONE
    shown = capsys.readouterr().out
    counted = re.search(r"(\d+) of (\d+) elements lie within the bound: PyTorch goes on as T5X did\.", shown)
    assert counted is not None
    assert counted[1] == counted[2] != "0"
    assert (tmp_path / "out" / "torch-ckpt.pt").is_file()
    assert "$ statekit inspect" in shown
    assert "$ statekit convert" in shown


def test_it_can_be_repeated(tmp_path: Path) -> None:
    assert [demo(tmp_path, "small_factor_shapes") for _ in range(2)] == [DONE, DONE]


def test_an_optimizer_that_steps_otherwise_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Adafactor.step

    def careless(self: Adafactor) -> None:
        step(self)
        with torch.no_grad():
            self.param_groups[0]["params"][0].view(-1)[0] *= 1 + 2**-20

    monkeypatch.setattr(Adafactor, "step", careless)
    assert demo(tmp_path, "momentum_f32") == WANTING
    assert "PyTorch does NOT go on as T5X did" in capsys.readouterr().out


def test_without_recordings_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("statekit.cli.demo_command.BUNDLE", Path("nosuch"))
    assert main(["demo"]) == FAILED
    assert "statekit demo BUNDLE" in capsys.readouterr().err
