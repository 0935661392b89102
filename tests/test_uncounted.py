"""Files that count no updates, as of SGD and Adagrad: nobody says 0, and a resume goes on."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import statekit
from statekit.attestation.doctor import doctor
from statekit.cli.main import main
from statekit.conversion.inspection import inspect
from statekit.conversion.open_state import open_state

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def saved(folder: Path, momentum: float = 0.9) -> list[Path]:
    """Returns the files of a run of plain PyTorch after each of three updates."""
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    files = []
    for number in range(1, 4):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        files.append(folder / f"step-{number}.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, files[-1])
    return files


def test_a_count_that_no_file_has_is_unknown_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path)[-1]
    seen = inspect(source).to_json()["optimizer"]
    assert seen["updates"] is None and seen["schedule"] is None
    assert main(["inspect", str(source)]) == 0
    assert "unknown: neither the optimizer nor its files count updates" in capsys.readouterr().out
    assert main(["resume", str(source), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["next_update"][0]["update"] is None
    assert main(["ls", str(tmp_path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {step["step"] for run in runs for step in run["checkpoints"]} == {None}


@pytest.mark.parametrize("target", ["statekit", "torch"])
def test_a_conversion_keeps_that_nobody_counts(target: str, tmp_path: Path) -> None:
    made = statekit.convert(saved(tmp_path)[-1], tmp_path / "made.pt", to=target)
    assert made.plan.source.step is None
    with open_state(tmp_path / "made.pt") as opened:
        assert opened.counts.done is None and "an unknown number of updates" in repr(opened)


def test_steps_of_a_run_that_counts_nothing_are_no_fault(tmp_path: Path) -> None:
    assert all(examination.passed and examination.updates is None for examination in doctor(*saved(tmp_path)))


def test_plain_sgd_lacks_no_slots_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path, momentum=0.0)[-1]
    raw = torch.load(source, weights_only=True)
    buffer = io.BytesIO()
    torch.save({**raw, "step": 3}, buffer)
    source.write_bytes(buffer.getvalue())
    assert not [finding for finding in inspect(source).findings if "no slots" in finding.what]
    assert main(["ls", str(tmp_path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert all(step["resumable"] for run in runs for step in run["checkpoints"])
