"""Writes the parts of docs/architecture.md that are drawn from the code: the rooms, and where each format stands."""

from __future__ import annotations

import ast
import textwrap
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import cast

from import_graph import FLOORS, HOMES
from statekit.conversion.contracts import Container, Layout

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"


def file_of(module: str) -> str:
    """Returns the file of a module, or the folder of a package, where it lies in a checkout; a folder ends in `/`."""
    homes = {**HOMES, "schemas": "statekit.schemas"}
    home, name = max(
        (home for home in homes.items() if within(module, home[1])), key=lambda home: len(home[1])
    )
    place = Path(home, *module.removeprefix(name).strip(".").split("."))
    return f"{place}/" if (ROOT / place).is_dir() else f"{place}.py"


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def linked(path: str) -> str:
    return f"[{path}](../{path})"


def rooms() -> Iterator[str]:
    """Yields the rooms from the ground up, each with what its own docstring says of it."""
    for height, names in enumerate(FLOORS):
        for name in names:
            place = "statekit/__init__.py" if name == "statekit" else file_of(name)
            source = ROOT / (f"{place}__init__.py" if place.endswith("/") else place)
            said = ast.get_docstring(ast.parse(source.read_bytes())) or ""
            item = f"- {height}, {linked(place)}: {' '.join(prose(said).split())}"
            yield textwrap.fill(
                item, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )


def prose(docstring: str) -> str:
    """Returns the sentences of a docstring, up to what is drawn or code."""
    paragraphs = docstring.split("\n\n")
    drawn = (i for i, text in enumerate(paragraphs) if text.startswith((" ", "import ")) or "──" in text)
    said = " ".join(paragraphs[: next(drawn, len(paragraphs))])
    return f"{said.removesuffix(':')}." if said.endswith(":") else said


def formats(family: str) -> Iterator[str]:
    """Yields the registered containers, or layouts, each with its title and the module it stands in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, target in project["entry-points"][f"statekit.{family}"].items():
        module, _, value = target.partition(":")
        title = cast(Container | Layout, getattr(import_module(module), value)).title.replace("<", "\\<")
        yield f"| `{name}` | {title} | {linked(file_of(module))} |"


def page(text: str) -> str:
    """Returns the page with the drawn parts as the code has them."""
    parts = {
        "rooms": [*rooms()],
        "containers": ["| container | | file |", "|---|---|---|", *formats("containers")],
        "layouts": ["| layout | | file |", "|---|---|---|", *formats("layouts")],
    }
    for name, lines in parts.items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        after = rest.partition("\n\n")[2]
        text = "\n".join([f"{before}<!-- {name} -->", *lines, "", after])
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
