"""The Jinja2 environment that all pages are made with: whatever a checkpoint holds comes out as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from statekit.errors import plural, printable, size, some
from statekit.pages import charts, parameter
from statekit.pages.charts import number
from statekit.pages.layers import by_layer
from statekit.pages.listing import all_numbers, inside, listing, total_magnitudes

PACKAGE = "statekit.pages"


def _shown(value: object) -> object:
    """Returns what an expression of a template puts out: text without control characters and marks of direction."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value, keep="\n")


def _escaped(value: object) -> Markup:
    return escape(_shown(value))


def wrapped(path: str) -> Markup:
    """Returns a path whose lines may end behind its slashes, before they end within a name."""
    return Markup("<wbr>").join(Markup(f"{_escaped(part)}") for part in re.split(r"(?<=/)", path))


def number_or_text(value: float | str | Mapping[str, str] | None) -> str:
    """Returns a number for people; JSON has NaN and infinities as text, which is returned as it is."""
    if isinstance(value, Mapping):
        return value["$float"]
    return value if isinstance(value, str) else number(value)


def shown(value: object) -> str:
    """Returns what one side of a comparison has."""
    return "nothing" if value is None else str(value)


def environment(*folders: Path, shared: Mapping[str, Any] | None = None) -> Environment:
    """Returns an environment with the templates of this room.

    Its filters are `size` (of bytes), `number`, `wrapped` (of a path) and `plural` (`count | plural("slot")`). An
    unknown name is an error.

    Args:
        folders: Further templates, looked for first.
        shared: Names that all templates know, beside those of this room.
    """
    templates = Environment(
        loader=ChoiceLoader([FileSystemLoader(folders), PackageLoader(PACKAGE)]),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(
        wrapped=wrapped,
        size=size,
        number=number,
        plural=plural,
        number_or_text=number_or_text,
        e=_escaped,
        escape=_escaped,
    )
    templates.globals.update(
        shown=shown,
        some=some,
        sparkline=charts.sparkline,
        listing=listing,
        inside=inside,
        all_numbers=all_numbers,
        total_magnitudes=total_magnitudes,
        plots_of_tensor=parameter.of_tensor,
        plot_of_figure=parameter.of_figure,
        plots_of_run=parameter.of_run,
        plots_of_region=parameter.of_region,
        by_layer=by_layer,
        plots_of_difference=parameter.of_difference,
    )
    templates.globals.update(shared or {})
    return templates


@cache
def stylesheet() -> str:
    """Returns the one style sheet: light and dark, narrow screens, print."""
    return resources.files(PACKAGE).joinpath("statekit.css").read_text(encoding="utf-8")


@cache
def script() -> str:
    """Returns the script of plots, which is optional in a page and adds the download as PNG."""
    return resources.files(PACKAGE).joinpath("statekit.js").read_text(encoding="utf-8")
