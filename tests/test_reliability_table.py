"""docs/reliability.md is what the suites saw, and nothing in it went wrong without a word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import reliability_table
from reliability_table import Row, Suite, figures, note, page

PAGE = reliability_table.TARGET.read_text(encoding="utf-8")


def test_the_page_is_drawn_by_its_script(tmp_path: Path) -> None:
    assert page(PAGE, tmp_path) == PAGE, "run `make tables`"


def test_nothing_in_it_ended_in_an_error_of_another_kind_or_hung() -> None:
    for head, *lines in _tables(PAGE):
        bad = [head.index(name) for name in ("untyped", "hung") if name in head]
        assert not [line for line in lines for at in bad if line[at] not in ("", "0")]


def _tables(text: str) -> list[list[list[str]]]:
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    split = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in b.splitlines()] for b in blocks
    ]
    return [[lines[0], *lines[2:]] for lines in split]


def test_figures_of_one_suite_make_its_section_and_leave_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        reliability_table, "SUITES", {"one": Suite("First", "What."), "two": Suite("Second", "What else.")}
    )
    note("one", Row("b", 3, caught=3, seconds=0.25), folder=tmp_path)
    first = page("", tmp_path)
    assert "| b | 3 | 3 | 0.2 |" in first and first.endswith("Not run yet.\n")
    (tmp_path / "one.json").unlink()
    note("two", Row("x", 1, silent=0), Row("y", 2, silent=1), folder=tmp_path)
    note("two", Row("y", 2, silent=0), folder=tmp_path)
    assert [row.silent for row in figures("two", tmp_path)] == [0, 0]
    both = page(first, tmp_path)
    assert "| b | 3 | 3 | 0.2 |" in both and "| all | 3 | 0 |" in both
    assert page(both, tmp_path) == both
