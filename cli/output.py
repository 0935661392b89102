"""What all verbs print with: tables on stdout, progress on stderr, JSON envelopes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from statekit.errors import printable
from statekit.tensors.tree import to_json

PIPED_WIDTH = 240
"""Columns where stdout is no terminal, so that lines there aren't cut at 80."""


def console() -> Console:
    """Returns the console of stdout. Text is printed as it is: no markup, no emoji, no guessed colours."""
    plain = Console(markup=False, emoji=False, highlight=False)
    if not plain.is_terminal:
        plain.width = PIPED_WIDTH
    return plain


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Returns an empty table without frames; columns named in `right` are aligned to the right."""
    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        grid.add_column(Text(column), justify="right" if column in right else "left", overflow="fold")
    return grid


def show(stdout: Console, grid: Table) -> None:
    """Prints a table; without the blanks that fill its last column, where that isn't a terminal."""
    if stdout.is_terminal:
        stdout.print(grid)
        return
    with stdout.capture() as captured:
        stdout.print(grid)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def show_list(stdout: Console, title: str, lines: Iterable[str]) -> None:
    """Prints a titled list, or nothing if it is empty. Lines that wrap stay indented."""
    kept = [printable(line, keep="\n") for line in lines]
    if not kept:
        return
    grid = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    for line in kept:
        grid.add_row(Text(line))
    stdout.print(f"\n{title}", style="bold")
    show(stdout, grid)


def plural(count: int, name: str) -> str:
    """Returns a number of things.

    Example:
        >>> plural(1, "slot"), plural(2, "slot")
        ('1 slot', '2 slots')
    """
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def progress(unit: str = "bytes") -> Progress:
    """Returns a progress bar on stderr, silent where that is no terminal. Use it as a context manager."""
    stderr = Console(stderr=True, markup=False, emoji=False, highlight=False)
    amount = (
        DownloadColumn() if unit == "bytes" else TextColumn("{task.completed:.0f}/{task.total:.0f} " + unit)
    )
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        amount,
        TimeRemainingColumn(),
        console=stderr,
        disable=not stderr.is_terminal,
        transient=True,
    )


def print_json(kind: str, data: dict[str, Any]) -> None:
    """Prints one JSON object whose first key, `format`, names what it is: `statekit.<kind>/1`."""
    envelope = {"format": f"statekit.{kind}/1", **to_json(data)}
    click.echo(json.dumps(envelope, indent=2, allow_nan=False))


def size(nbytes: int) -> str:
    """Returns a number of bytes for people.

    Example:
        >>> size(1536), size(12)
        ('1.5 KiB', '12 B')
    """
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
