"""`statekit demo`: what `make demo` shows is true, and would be noticed if it weren't."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from goldens import bundles
from statekit.cli.demo.loss_plot import Curve, Panel, picture
from statekit.cli.main import DONE, FAILED, WANTING, main
from statekit.torch import Adafactor

pytestmark = pytest.mark.torch
CASES = {path.name: path for path in bundles("t5x")}


def demo(tmp_path: Path, case: str | None) -> int:
    named = [] if case is None else [str(CASES[case])]
    return main(["demo", *named, "--out", str(tmp_path / "out")])


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


@pytest.mark.parametrize(("bundle", "by"), [(None, 2**-4), ("momentum_f32", 2**-20)])
def test_an_optimizer_that_steps_otherwise_is_noticed(
    bundle: str | None,
    by: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = Adafactor.step

    def careless(self: Adafactor) -> None:
        step(self)
        with torch.no_grad():
            self.param_groups[0]["params"][0].view(-1)[0] *= 1 + by

    monkeypatch.setattr(Adafactor, "step", careless)
    assert demo(tmp_path, bundle) == WANTING
    assert "PyTorch does NOT go on as T5X did" in capsys.readouterr().out


def test_without_recordings_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("statekit.cli.demo.demo_command.BUNDLE", Path("nosuch"))
    assert main(["demo"]) == FAILED
    assert "statekit demo BUNDLE" in capsys.readouterr().err


def test_the_curves_are_a_picture_of_every_update(tmp_path: Path) -> None:
    values = {n: float(n) for n in range(1, 17)}
    panels = [
        Panel("a", [Curve("b", values, "red", dots=True)]),
        Panel("c", [Curve("d", values, "red")], powers=True),
    ]
    root = ElementTree.fromstring(picture(panels, 8, "converted"))
    tags = [one.tag.rpartition("}")[2] for one in root]
    assert tags.count("circle") == 16 + 1
    assert tags.count("polyline") == 2
    assert "converted" in [one.text for one in root]


@pytest.mark.parametrize("points", [{9: 1.0}, {9: 10.0, 10: 10.0}, {9: 0.0, 10: 0.0}])
@pytest.mark.parametrize("powers", [True, False])
def test_a_picture_of_one_update_or_of_equal_values_is_one_too(
    points: dict[int, float], powers: bool
) -> None:
    root = ElementTree.fromstring(picture([Panel("a", [Curve("b", points, "red")], powers)], 8, "converted"))
    assert {one.tag.rpartition("}")[2] for one in root} >= {"line", "text"}


def test_without_transformers_a_whole_run_isnt_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert demo(tmp_path, None) == FAILED
    shown = capsys.readouterr()
    assert ".[hf]" in shown.err
    assert not shown.out
    assert not (tmp_path / "out").exists()
