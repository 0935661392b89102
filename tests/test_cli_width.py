"""Output at the width of a terminal: names fold at `/`, columns are left out before words are broken."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from goldens import GOLDEN
from statekit.cli import output
from statekit.cli.main import DONE, main
from statekit.cli.output import Screen, Styled, Table, folded_error, folds

RUN = GOLDEN / "t5x" / "momentum_f32"
WORDS = re.compile(r"[A-Za-z_]\w*")
COMMANDS = [
    ["inspect", str(RUN / "checkpoint")],
    ["inspect", str(RUN / "checkpoint"), "--stats"],
    ["inspect", str(GOLDEN / "torch_formats" / "adamw_trainer" / "checkpoint" / "checkpoint-4")],
    ["convert", str(RUN / "checkpoint"), "out.pt", "--dry-run"],
    ["formats"],
    ["formats", "--matrix"],
    ["schemas"],
    ["schemas", "adamw", "--variant", "torch", "--variant", "keras"],
    ["replay", str(RUN)],
]


def shown(
    arguments: list[str], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setattr(output, "screen", lambda: Screen(width, colour=False))
    monkeypatch.setattr("statekit.cli.replay_command.screen", lambda: Screen(width, colour=False))
    assert main(arguments) == DONE
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda a: " ".join(Path(part).name for part in a))
def test_every_word_stays_whole(
    arguments: list[str],
    width: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No word stands at 60 columns that doesn't stand where there is room for all."""
    monkeypatch.chdir(tmp_path)
    wide = shown(arguments, 10_000, monkeypatch, capsys)
    narrow = shown(arguments, width, monkeypatch, capsys)
    lines = [line for line in narrow.splitlines() if not line.startswith("  target = ")]
    assert max(map(len, lines)) <= width
    notes = re.sub(r"Left out at \d+ columns", "", narrow)
    assert set(WORDS.findall(notes)) <= set(WORDS.findall(wide))


def test_names_fold_first_then_columns_go() -> None:
    table = Table(("name", "dtype", "bytes"), right=("bytes",), drop=("dtype",))
    table.add_row("encoder/layers_0/kernel", "float32", "1.0 KiB")
    texts = {
        width: ["".join(p.text for p in line).rstrip() for line in table.lines(width)]
        for width in (50, 30, 22)
    }
    assert texts[50][1] == "encoder/layers_0/kernel  float32  1.0 KiB"
    assert texts[30][1:] == ["encoder/      float32  1.0 KiB", "  layers_0/", "  kernel"]
    assert table.left_out(30) == []
    assert table.left_out(22) == ["dtype"]
    assert texts[22][1:] == ["encoder/       1.0 KiB", "  layers_0/", "  kernel"]


def test_a_word_is_broken_only_where_a_line_is_too_short_for_it() -> None:
    assert folds("abcdefghij", 4, 0) == ["abcd", "efgh", "ij"]
    assert folds("中文中文", 4, 0) == ["中文", "中文"]
    table = Table(("name",), titled=False)
    table.add_row(Styled("x" * 50))
    assert len(list(table.lines(20))) > 1


def test_an_errors_words_and_paths_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "Error: There is no layout of that name.\n  expected: "
        + ", ".join(["torch-optim"] * 9)
        + "\n  at: "
        + "/a" * 40
    )
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    lines = folded_error(text).split("\n")
    assert lines[0] == "Error: There is no layout of that name."
    assert lines[1].startswith("  expected: torch-optim, ") and lines[2].startswith("    torch-optim")
    assert max(map(len, lines[:-1])) <= 60
    assert lines[-1].strip() == "/a" * 40


def test_what_is_assumed_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(RUN / "checkpoint")]) == DONE
    printed = capsys.readouterr().out
    assert printed.count("multiply_by_parameter_scale=") == 1
    assert "T5X stores no hyperparameters: see `assumed` above." in printed


def test_the_other_steps_of_a_run_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (4, 3, 2):
        shutil.copytree(RUN / "checkpoint" / "checkpoint_4", tmp_path / f"checkpoint_{step}")
    assert main(["inspect", str(tmp_path), "--step", "3"]) == DONE
    assert "other steps  2, 4 (--step N opens one)" in capsys.readouterr().out
