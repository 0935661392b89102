"""What README and its pages say is true: commands run, output is as shown, Python runs, tables are the registry's."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import click
import pytest

from goldens import GOLDEN
from statekit.cli import output
from statekit.cli.arguments import Page
from statekit.cli.main import DONE, VERBS, main, statekit
from statekit.conversion import registry
from statekit.conversion.open_state import open_state
from statekit.maps.model_map import map_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in ("docs/start/everyday.md", "docs/optimizers.md", "docs/proof.md")
}
BLOCKS = [
    block
    for text in PAGES.values()
    for block in re.findall(r"<!-- run -->\n```(sh|python)\n(.*?)```", text, re.DOTALL)
]
WIDTH = 120
"""Columns of the terminal whose output README shows."""
MOST_LINES, MOST_BYTES = 130, 9000


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that README's second command fills."""
    folder = tmp_path_factory.mktemp("sample")
    assert main(["demo", "--sample", str(folder)]) == DONE
    return folder


@pytest.fixture
def there(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sample)
    monkeypatch.setattr(output, "screen", lambda: output.Screen(WIDTH, colour=False))


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES and len(README.encode()) <= MOST_BYTES
    assert README.index("pip install .") < README.index("demo --sample .") < README.index("$ statekit")


def shown(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the commands of the blocks that are shown with their output, each with that."""
    for block in re.findall(r"<!-- shown -->\n```console\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.rstrip("\n").split("\n")
            yield command, lines


def fits(lines: list[str], printed: list[str]) -> bool:
    """Tells whether lines are what was printed, where `...` stands for any others; digits may be others."""

    def masked(line: str) -> str:
        return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?", "0", line)).strip()

    parts = [[*part] for gap, part in groupby(lines, lambda line: line == "...") if not gap]
    rest = [masked(line) for line in printed if line.strip()]
    at = 0
    for number, part in enumerate(parts):
        wanted = [masked(line) for line in part if line.strip()]
        starts = range(at, len(rest) - len(wanted) + 1)
        found_at = next((start for start in starts if rest[start : start + len(wanted)] == wanted), None)
        if found_at is None or (number == 0 and lines[0] != "..." and found_at):
            return False
        at = found_at + len(wanted)
    return lines[-1] == "..." or at == len(rest)


def test_what_it_shows_is_what_is_printed(there: None, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [*shown(README)]
    assert len(commands) >= 4
    capsys.readouterr()
    for command, lines in commands:
        assert main(shlex.split(command)[1:]) == DONE, capsys.readouterr()
        printed = capsys.readouterr().out.splitlines()
        assert fits(lines, printed), "\n".join(printed)
        if " convert " in command:
            assert len(printed) < 20


def test_a_line_that_is_not_printed_is_noticed() -> None:
    printed = ["one 1", "two 2", "", "three"]
    assert fits(["one 7", "...", "three"], printed) and fits(["...", "two 2", "..."], printed)
    assert not fits(["two 2", "..."], printed) and not fits(["one 1", "..", "three"], printed)
    assert not fits(["one 1", "..."], ["zero", "one 1"]) and not fits(["one 1"], printed)
    assert not fits(["...", "two 2", "one 1", "..."], printed)


def test_what_it_says_of_moving_a_run_is_taken_by_the_command_line(
    there: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the sample are carried out; of the others the options and maps are there."""
    commands = re.findall(r"\| `statekit (convert [^`]*)` \|", README)
    assert len(commands) >= 5
    for command in commands:
        words = shlex.split(command)
        if "--map" in words:
            assert words[words.index("--map") + 1] in map_names()
        if Path(words[1]).exists():
            assert main(words) == DONE, capsys.readouterr()
        else:
            verb = statekit.get_command(click.Context(statekit), words[0])
            assert verb is not None
            verb.make_context(words[0], words[1:])
    assert Path("back.pt").is_file()


@pytest.mark.torch
@pytest.mark.slow
def test_the_examples_of_help_run(there: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the verbs' everyday use, in a folder as the sample's."""
    for name in ("t5x-ckpt", "trainer-run"):
        shutil.copytree(name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in ("convert", "inspect", "verify", "resume", "doctor") if name in VERBS]:
        page = statekit.get_command(click.Context(statekit), name)
        assert isinstance(page, Page)
        for line in page.examples:
            assert main(shlex.split(line)[1:]) == DONE, line


@pytest.mark.torch
@pytest.mark.jax
def test_every_command_and_every_line_of_python_of_its_pages_runs(
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
            exec(compile(text, "page.md", "exec"), {"model": model})
            continue
        for line in text.strip().splitlines():
            assert line.startswith("statekit ")
            assert main(shlex.split(line)[1:]) == DONE, capsys.readouterr()
            assert capsys.readouterr().out.strip()


def test_the_table_of_formats_is_the_registrys() -> None:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    table = text.split("<!-- formats -->\n")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]
    listed = {(container, layout): (read, write) for _, container, layout, read, write, _ in rows}
    true = {
        (name, layout.name): ("yes", "yes" if registry.container(name).target_kind else "no")
        for layout in map(registry.layout, registry.layout_names())
        for name in layout.containers
    }
    assert listed == true


@pytest.mark.parametrize(
    "name", ["README.md", *PAGES, "docs/attest.md", "docs/formats.md", "docs/write_a_converter.md"]
)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


@pytest.mark.torch
def test_the_demo_prints_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the figures, whose last digits depend on how a machine adds."""
    table = PAGES["docs/start/everyday.md"].split("<!-- demo -->\n```text\n")[1].split("```")[0]
    monkeypatch.chdir(ROOT)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    printed = printed.replace(str(tmp_path / "out"), "demo-out")
    assert words(table) == words(printed[printed.index("3. Updates") :])


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_/]{3,}", text)
