"""`statekit replay`: what is replayed, what begins with fresh slots, and what is listed with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from goldens import GOLDEN
from statekit.cli import replay_command
from statekit.cli.main import DONE, FAILED, USAGE, WANTING, main
from statekit.verify.contract import DESCRIPTION, GRADS, TRAJECTORY
from statekit.verify.recording import open_recording, to_json
from statekit.verify.replay import Replay, Subject

CASE = GOLDEN / "t5x" / "momentum_f32"
INCOMPARABLE = {
    "t5x_train/t5_10_tied", "t5x_train/t5_11_scanned", "t5x_train/t5_11_unscanned",
    "torch_formats/adafactor_deepspeed_zero1", "torch_formats/adafactor_fsdp1_full",
}  # fmt: skip
"""States 8, 10 and 16 only; Adafactor on the pieces that ranks hold."""


def replayed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["replay", "--json", *map(str, arguments)])
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, data


def copied(folder: Path, **changes: Any) -> Path:
    """A recording that shares the files of another and is described otherwise."""
    folder.mkdir()
    for name in (GRADS, TRAJECTORY):
        (folder / name).symlink_to(CASE.resolve() / name)
    (folder / DESCRIPTION).write_text(json.dumps({**to_json(open_recording(CASE)), **changes}))
    return folder


@pytest.fixture
def unreadable(tmp_path: Path) -> Path:
    """A recording whose checkpoint no container reads."""
    folder = copied(tmp_path / "unreadable", checkpoint={"path": "state.bin", "step": 4})
    (folder / "state.bin").write_bytes(b"whatever")
    return folder


def unmoved(subject: Subject, *_: object) -> Replay:
    """Stands for a replay that takes no step."""
    return Replay(subject.recording.name, "numpy", subject.start, (0, 0), (), (), {})


@pytest.mark.parametrize("steps", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_path_is_replayed_or_listed_with_its_reason(
    steps: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not steps:
        monkeypatch.setattr(replay_command, "replayed", unmoved)
    paths = sorted(GOLDEN.glob("*/*"))
    code, data = replayed(capsys, *paths)
    assert code == DONE and data["passed"]
    shown = {result["recording"] for result in data["results"]}
    assert shown | data["skipped"].keys() == {f"{path.parent.name}/{path.name}" for path in paths}
    assert not shown & data["skipped"].keys()
    complete = {path for path in paths if (path / GRADS).is_file() and (path / TRAJECTORY).is_file()}
    assert shown == {f"{path.parent.name}/{path.name}" for path in complete} - INCOMPARABLE
    assert all(data["skipped"].values()) and all(data["fresh"].values())
    assert data["fresh"].keys() == {r["recording"] for r in data["results"] if r["start"] == "init"}


def test_where_the_checkpoint_cant_be_read_a_run_begins_with_fresh_slots(
    capsys: pytest.CaptureFixture[str], unreadable: Path
) -> None:
    code, data = replayed(capsys, unreadable, CASE)
    assert code == DONE
    assert [result["start"] for result in data["results"]] == ["init", "checkpoint"]
    (why,) = data["fresh"].values()
    assert "No container fits" in why and "state.bin" in why
    assert main(["replay", str(unreadable)]) == DONE
    assert "from fresh slots" in capsys.readouterr().out


def test_a_run_without_a_checkpoint_begins_with_fresh_slots(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, data = replayed(capsys, copied(tmp_path / "bare", checkpoint=None))
    assert code == DONE
    assert list(data["fresh"].values()) == ["The recording has no checkpoint. (none)"]


def test_a_start_that_was_asked_for_is_never_replaced(
    capsys: pytest.CaptureFixture[str], unreadable: Path
) -> None:
    code, data = replayed(capsys, "--start", "checkpoint", unreadable, CASE)
    assert code == DONE
    assert [result["start"] for result in data["results"]] == ["checkpoint"]
    assert [name.rpartition("/")[2] for name in data["skipped"]] == ["unreadable"]
    assert replayed(capsys, "--start", "checkpoint", unreadable)[0] == FAILED
    capsys.readouterr()
    assert main(["replay", "--checkpoint", str(unreadable / "state.bin"), str(CASE)]) == FAILED
    assert "No container fits" in capsys.readouterr().err


def test_states_that_dont_follow_one_another_are_no_recording(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "gap"
    folder.mkdir()
    (folder / "meta.json").write_text('{"system": "t5x"}')
    save_file({"1/a": np.ones(1)}, folder / GRADS)
    save_file({"0/param/a": np.ones(1), "2/param/a": np.ones(1)}, folder / TRAJECTORY)
    code, data = replayed(capsys, folder, CASE)
    assert code == DONE
    assert [why for why in data["skipped"].values() if "states 0, 2" in why]


def test_a_difference_is_found_wanting(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = replayed(capsys, "--hparams", "beta1=0.8", CASE)
    assert code == WANTING and not data["passed"]


def test_a_hyperparameter_that_nobody_knows_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--hparams", "decay_rat=0.7", str(CASE)]) == USAGE
    assert "did you mean decay_rate?" in capsys.readouterr().err
