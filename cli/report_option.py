"""`--report FILE.html`: what a verb found as a page, of all verbs that have one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from statekit.cli.arguments import place_of

_FIRST_LINE = 200


def _is_report(path: Path) -> bool:
    from statekit.pages.report import MARK

    with path.open("rb") as file:
        return MARK.encode() in file.readline(_FIRST_LINE)


def report_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the option; the command gets `report`, where to write one."""
    return click.option(
        "--report",
        metavar="FILE.html",
        type=click.Path(path_type=Path),
        callback=place_of("report", _is_report),
        help="Also write a self-contained HTML page. It replaces an earlier report.",
    )(command)


def write_report(path: Path | None, verb: str, result: Mapping[str, Any]) -> None:
    """Writes a verb's result as a page, if one is asked for; what was there stays until all of it is on the disk."""
    if path is None:
        return
    from statekit.files.durable import replace_file
    from statekit.pages.report import report
    from statekit.tensors.tree import to_json

    replace_file(path, report(verb, to_json(dict(result))).encode("utf-8"))
