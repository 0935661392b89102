"""What README says is true: its commands run, its Python runs, its table is the registry's."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from goldens import GOLDEN
from statekit.cli.main import main
from statekit.conversion import registry
from statekit.conversion.open_state import open_state

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- run -->\n```(sh|python)\n(.*?)```", README, re.DOTALL)


@pytest.mark.torch
@pytest.mark.jax
def test_every_command_and_every_line_of_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch_models import blank_model

    case = GOLDEN / "t5x" / "momentum_f32"
    shutil.copytree(case / "checkpoint" / "checkpoint_4", tmp_path / "t5x-ckpt" / "checkpoint_4")
    shutil.copytree(case, tmp_path / "tests" / "golden" / "t5x" / "momentum_f32")
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) >= 5
    for language, text in BLOCKS:
        if language == "python":
            with open_state(tmp_path / "t5x-ckpt") as opened:
                model = blank_model(opened.state.params)
            exec(compile(text, "README.md", "exec"), {"model": model})
            continue
        for line in text.strip().splitlines():
            assert line.startswith("statekit ")
            assert main(shlex.split(line)[1:]) == 0, capsys.readouterr()
            assert capsys.readouterr().out.strip()


def test_the_table_of_formats_is_the_registrys() -> None:
    table = README.split("<!-- formats -->\n")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]
    said = {(container, layout): (read, write) for _, container, layout, read, write, _ in rows}
    true = {
        (name, layout.name): ("yes", "yes" if registry.container(name).target_kind else "no")
        for layout in map(registry.layout, registry.layout_names())
        for name in layout.containers
    }
    assert said == true


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.torch
def test_the_demo_prints_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the figures, whose last digits depend on how a machine adds."""
    shown = README.split("<!-- demo -->\n```text\n")[1].split("```")[0]
    monkeypatch.chdir(ROOT)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    printed = printed.replace(str(tmp_path / "out"), "demo-out")
    assert words(shown) == words(printed[printed.index("3. Updates") :])


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_/]{3,}", text)
