"""`statekit cold-start`, and `convert --verify`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from goldens import COMPACT
from statekit.cli.main import main
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import plan
from statekit.errors import StateError
from statekit.verify.certificate import read_certificate
from statekit.verify.cold_start import cold_start

T5X = COMPACT / "t5x/momentum_f32/checkpoint/checkpoint_4"
ADAMW = COMPACT / "torch_formats/adamw_legacy/checkpoint/checkpoint.pt"


def test_a_cold_start_makes_other_first_updates(capsys: pytest.CaptureFixture[str]) -> None:
    result = cold_start(ADAMW, updates=4)
    assert result.median(0) > 0.1
    assert {one.path for one in result.layers} == set(result.sample["stepped"])
    assert main(["cold-start", str(ADAMW), "--updates", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["data"]["median"] if "data" in said else said["median"]) == 2
    assert main(["cold-start", str(ADAMW), "--updates", "2"]) == 0
    assert "Without its optimizer's state" in capsys.readouterr().out


def test_a_cold_start_asks_for_what_a_step_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cold-start", str(T5X)]) == 3
    assert "beta1" in capsys.readouterr().err


@pytest.mark.torch
def test_where_nothing_is_moved_it_says_so(tmp_path: Path) -> None:
    import torch

    param = torch.nn.Parameter(torch.ones(0, 3))
    optimizer = torch.optim.AdamW([param])
    param.grad = torch.ones(0, 3)
    optimizer.step()
    torch.save({"model": {"w": param.data}, "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    with pytest.raises(StateError, match="No parameter is moved"):
        cold_start(tmp_path / "run.pt")


@pytest.mark.torch
def test_a_conversion_is_verified_where_that_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(ADAMW), str(tmp_path / "out.pt"), "--verify", "--certificate", str(tmp_path / "cert.json")]
    assert main(["convert", *words, "--layout", "statekit-torch"]) == 0
    assert "The same run" in capsys.readouterr().out
    assert read_certificate(tmp_path / "cert.json").passed


def test_a_dtype_that_only_describes_is_made_one() -> None:
    hints = Hints({"beta1": 0.9}, "t2t_late")
    source = COMPACT / "t2t/late_beta1_scaled_extlr/checkpoint"
    planned = plan(source, Path("never-written"), to="t5x", layout="t5x", hints=hints)
    assert planned.state["groups"][0]["hyperparameters"]["dtype_momentum"] == "float32"
