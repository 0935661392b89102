"""`statekit convert`: what it says, what it writes, and how to go on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from goldens import GOLDEN
from statekit.cli.main import DONE, FAILED, USAGE, main
from statekit.conversion.resume import next_update

RUN = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"
TOLD = ("--hparams", "beta1=0.9", "--hparams", "min_dim_size_to_factor=8")


def converted(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["convert", *map(str, arguments)]) == DONE, capsys.readouterr().err
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    return json.loads(converted(capsys, *arguments, "--json"))


def test_the_users_own_line_works_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t5x-ckpt").symlink_to(RUN)
    monkeypatch.chdir(tmp_path)
    shown = converted(capsys, "t5x-ckpt", "torch-ckpt", "--explain")
    assert Path("torch-ckpt").is_file()
    assert "container t5x, layout t5x, step 4" in shown
    assert "container torch, layout statekit-torch, step 4" in shown
    assert "22 bitwise" in shown
    assert "Assumed, because the source doesn't say:" in shown
    assert "22 tensors read again and found as meant" in shown


def test_in_short_it_says_the_verdict_what_it_rests_on_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = converted(capsys, RUN, tmp_path / "state.pt").splitlines()
    assert len(shown) < 20
    assert (
        shown[0].startswith("BITWISE, if no weight_decay_rate")
        and "unknown: learning_rate, beta1" in shown[0]
    )
    (assumed,) = [line for line in shown if line.startswith("Assumed: ")]
    assert "beta1 isn't stored: m is in use, so momentum was on; T5X stores no hyperparameters; " in assumed
    assert any("--explain" in line for line in shown)
    assert any("load_optimizer(" in line for line in shown)


def test_in_short_it_names_what_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lossy = ("--params-only", "--param-dtype", "bfloat16", "--require", "lossy")
    shown = converted(capsys, RUN, tmp_path / "state.pt", *lossy)
    assert shown.startswith("LOSSY")
    assert "\nNot bitwise: " in shown and "\nMeasured: " in shown
    assert "\nChanged, as asked: " in shown


@pytest.mark.torch
def test_in_short_it_names_what_stands_in_the_manifest_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training loop that reads the branch again finds no key of its name."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1)
    ema = {"weight": torch.ones(2), "device": torch.device("cpu")}
    torch.save({"model": model.state_dict(), "ema": ema}, tmp_path / "run.pt")
    assert main(["convert", str(tmp_path / "run.pt"), str(tmp_path / "out.pt")]) == DONE
    assert "In the manifest alone, for the way back: extra/torch/ema" in capsys.readouterr().out


def test_quietly_it_says_nothing_and_does_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert converted(capsys, RUN, tmp_path / "state.pt", "--quiet") == ""
    assert (tmp_path / "state.pt").is_file()
    assert main(["convert", str(RUN), str(tmp_path / "state.pt"), "--quiet"]) == FAILED
    assert "The target exists." in capsys.readouterr().err


def test_says_how_to_go_on_in_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "state.pt"
    lines = as_json(capsys, RUN, target)["resume"]
    assert lines[1] == f'statekit.torch.load_params("{target}", model)'
    assert lines[2].endswith("model.named_parameters(), lr=..., beta1=...)")
    resume_lines = as_json(capsys, RUN, target, *TOLD, "--replace")["resume"]
    assert resume_lines[2].endswith("model.named_parameters(), lr=...)")


@pytest.mark.parametrize(
    ("offset", "value", "decay"), [("keep", 0, 1 - 5**-0.8), ("reset", 4, 0.0), ("3", 3, 1 - 2**-0.8)]
)
def test_says_what_the_next_update_uses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], offset: str, value: int, decay: float
) -> None:
    data = as_json(capsys, RUN, tmp_path / "state.pt", *TOLD, "--step-offset", offset)
    (group,) = data["next_update"]
    assert (group["parameters"], group["learning_rate"], group["update"], group["schedule"]) == (
        6,
        None,
        4,
        4,
    )
    assert (group["step_offset"], group["decay"]) == (value, pytest.approx(decay))


def test_says_how_to_go_on_in_t5x_with_what_t5x_does_not_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = as_json(capsys, RUN, tmp_path / "t5x-out", "--step-offset", "reset")
    assert data["resume"] == [
        f'utils.RestoreCheckpointConfig.path = "{tmp_path / "t5x-out" / "checkpoint_4"}"',
        'utils.RestoreCheckpointConfig.mode = "specific"',
        "adafactor.Adafactor.step_offset = 4",
    ]
    assert (tmp_path / "t5x-out" / "checkpoint_4" / "checkpoint").is_file()


def test_a_decay_is_only_said_where_it_is_known() -> None:
    group = {"paths": ["a"], "hyperparameters": {"step_offset": 0}}
    state = {
        "schema": "adafactor",
        "variant": "t5x",
        "counts": {"updates": 1, "schedule": 1},
        "groups": [group],
    }
    assert next_update(state)[0]["decay"] is None
    assert "decay" not in next_update({**state, "schema": "adamw"})[0]


def test_a_dry_run_lists_every_tensor_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = converted(capsys, RUN, tmp_path / "state", "--to", "statekit", "--dry-run")
    assert "slots/token_embedder/embedding/v_row" in shown
    assert "state/param_states/token_embedder/embedding/v_row" in shown
    assert "Wrote" not in shown
    data = as_json(capsys, RUN, tmp_path / "state", "--to", "statekit", "--dry-run")
    assert data["report"] is None
    assert len(data["plan"]["tensors"]) == 22
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_whether_the_place_is_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "state.pt"

    def noted(*options: str) -> str:
        assert main(["convert", str(RUN), str(target), "--dry-run", *options]) == 0
        return capsys.readouterr().err

    assert noted() == noted("--replace") == ""
    target.write_bytes(b"somebody's")
    assert "Note: this would be refused: The target exists" in noted()
    assert "Note: this would be refused: The target is a file that statekit didn't write" in noted(
        "--replace"
    )
    assert noted("--replace-foreign") == ""
    assert target.read_bytes() == b"somebody's"


def test_the_envelope_is_stable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = as_json(capsys, RUN, tmp_path / "state.pt")
    assert list(data) == ["format", "plan", "plan_digest", "findings", "report", "next_update", "resume"]
    assert data["format"] == "statekit.convert/1"
    assert data["report"]["verified"] == 22
    assert data["report"]["plan"] == data["plan_digest"]


def test_what_a_target_has_no_place_for_or_makes_up_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converted(capsys, RUN, tmp_path / "state", "--to", "statekit")
    shown = converted(capsys, tmp_path / "state", tmp_path / "t5x-out", "--explain")
    assert "Made without a source:" in shown
    assert "filled with 0" in shown


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["result"], USAGE, "doesn't say what to write"),
        (["x.pt", "--to", "nosuch"], USAGE, "No container has that name"),
        (["x.pt", "--layout", "nosuch"], USAGE, "nosuch"),
        (
            ["x.pt", "--layout", "AdamW"],
            USAGE,
            "for the container torch one of bitsandbytes-32bit",
        ),
        (["x.pt", "--step-offset", "soon"], USAGE, "neither keep, reset nor a number"),
        (["x.pt", "--step-offset", "5"], USAGE, "from 0 to the step, 4"),
        (["x.pt", "--require", "perfect"], USAGE, "'perfect' is not one of"),
        (["x.pt", "--hparams", "beta3=1"], USAGE, "isn't a hyperparameter of adafactor"),
        (["x.pt", "--hparams", "lr=1"], USAGE, "did you mean learning_rate?"),
        (["x.pt", "--step", "7"], FAILED, "step"),
        (["gs://bucket/x.pt"], USAGE, "gcloud storage cp"),
    ],
)
def test_errors_say_what_is_wrong_and_leave_nothing(
    options: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "obstore", None)  # without it nothing writes into stores
    assert main(["convert", str(RUN), *options]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_target_stays_unless_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "state.pt"
    target.write_text("mine", encoding="utf-8")
    assert main(["convert", str(RUN), str(target)]) == FAILED
    assert "--replace" in capsys.readouterr().err
    assert target.read_text(encoding="utf-8") == "mine"
    assert main(["convert", str(RUN), str(target), "--replace"]) == FAILED  # statekit didn't write it
    assert "--replace-foreign" in capsys.readouterr().err
    converted(capsys, RUN, target, "--replace-foreign")
    assert target.stat().st_size > 10_000


def test_a_map_and_other_names_are_said_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = next((GOLDEN / "t5x_checkpoints" / "unscanned" / "msgpack_v3").glob("checkpoint_*"))
    back = ("--rename", "^encoder/=enc/", "--rename", "^enc/=encoder/")
    shown = converted(capsys, run, tmp_path / "a.pt", "--map", "t5x-t5:hf-t5", *back, "--dry-run")
    assert "t5x-t5:hf-t5" in shown and "^enc/=encoder/" in shown
    assert "token_embedder/embedding -> shared/weight (v_row, v_col)" in shown
    assert not (tmp_path / "a.pt").exists()
    capsys.readouterr()
    assert main(["convert", str(run), str(tmp_path / "a.pt"), "--rename", "nothing"]) == USAGE
    assert "PATTERN=REPLACEMENT" in capsys.readouterr().err
    assert main(["convert", str(run), str(tmp_path / "a.pt"), "--map", "t5x-t5:hf-t6"]) == USAGE
    assert "did you mean t5x-t5:hf-t5?" in capsys.readouterr().err
    assert main(["convert", str(run), str(tmp_path / "a.pt"), "--config", "num_heads=4"]) == USAGE
    assert "No map" in capsys.readouterr().err
