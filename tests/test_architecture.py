"""docs/architecture.md is true: what is drawn is as the code has it, and what is told happens in that order."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import architecture
import pytest

from entered import CONVERT, SOURCE, STEP, Call, entered
from import_graph import HOMES

ROOT = Path(__file__).parents[1]
TEXT = architecture.PAGE.read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)#]+)\)")
MOST_ENTERED = 55
PACKAGES = [
    f"{path.relative_to(ROOT)}"
    for top in ("converters", "cli")
    for path in sorted((ROOT / top).rglob("__init__.py"))
]


def section(title: str) -> str:
    return TEXT.split(f"## {title}\n")[1].split("\n## ")[0]


def linked_modules(title: str) -> list[str]:
    """Returns the modules that a section links to, in order, by the files they stand in."""
    return [link.removeprefix("../") for link in LINK.findall(section(title)) if link.endswith(".py")]


def out_of_order(names: Sequence[str], happened: Sequence[str]) -> list[str]:
    """Returns the names that didn't happen, or not after the one before."""
    places = [happened.index(name) if name in happened else -1 for name in names]
    return [name for i, name in enumerate(names) if places[i] < 0 or (i and places[i] <= max(places[:i]))]


def test_what_is_drawn_is_as_the_code_has_it() -> None:
    assert architecture.page(TEXT) == TEXT, "run `make tables`"


def test_links_lead_somewhere() -> None:
    links = LINK.findall(TEXT)
    assert len(links) > 80
    assert [link for link in links if not (architecture.PAGE.parent / link).exists()] == []


def test_files_that_are_named_without_a_link_are_there_too() -> None:
    named = re.findall(r"`([\w/]+/\w+\.py)`", TEXT)
    assert named
    files = [path for home in (*HOMES, "tests") for path in (ROOT / home).rglob("*.py")]
    assert [name for name in named if not any(f"{path}".endswith(f"/{name}") for path in files)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_does_and_what_goes_in_and_comes_out(package: str) -> None:
    said = " ".join((ast.get_docstring(ast.parse((ROOT / package).read_bytes())) or "").split())
    assert re.search(r"\b[Ii]nput:", said) and re.search(r"\b[Oo]utput:", said)
    assert len(re.findall(r"[.;:](?=\s|$)", said)) >= 3


@pytest.fixture(scope="module")
def entered_by(tmp_path_factory: pytest.TempPathFactory) -> dict[Call, list[str]]:
    """Returns the modules that each call enters."""
    folder = tmp_path_factory.mktemp("entered")
    return {call: entered(call, SOURCE, folder / "torch-ckpt.pt") for call in (CONVERT, STEP)}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("title", "call"), [("The way of a conversion", CONVERT), ("The way of an update", STEP)]
)
def test_the_way_is_gone_in_that_order(
    title: str, call: Call, entered_by: Mapping[Call, Sequence[str]]
) -> None:
    names, happened = linked_modules(title), entered_by[call]
    assert len(names) > 7
    assert out_of_order(names, [architecture.file_of(name) for name in happened]) == []


@pytest.mark.torch
@pytest.mark.parametrize(
    "call",
    [CONVERT, STEP],
    ids=["convert", "step"],
)
def test_a_reader_who_follows_a_call_has_few_modules_to_read(
    call: Call, entered_by: Mapping[Call, Sequence[str]]
) -> None:
    assert len(entered_by[call]) <= MOST_ENTERED


def test_another_order_is_noticed() -> None:
    happened = ["a", "b", "c"]
    assert out_of_order(["a", "c"], happened) == []
    assert out_of_order(["b", "a"], happened) == ["a"]
    assert out_of_order(["a", "x"], happened) == ["x"]


def test_a_module_that_is_only_imported_is_not_entered(tmp_path: Path) -> None:
    """Its table is made by a generator, which is a function to Python."""
    names = entered(Call("", "import statekit.state.rates"), SOURCE, tmp_path / "nothing.pt")
    assert "statekit.state.rates" not in names
