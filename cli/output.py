"""What all verbs print with: text and tables that fit the terminal, progress on stderr, JSON envelopes."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import click

from statekit.errors import printable

if TYPE_CHECKING:
    from statekit.files.tree import Place


PIPED_WIDTH = 240
"""Columns where stdout is no terminal, so that lines there aren't cut at 80."""
GAP = 2
"""Columns between those of a table."""


class Styled(NamedTuple):
    """Text that stands out, or stands back."""

    text: str
    bold: bool = False
    dim: bool = False


Cell = str | Styled


@dataclass
class Table:
    """Rows that are laid out when the width is known: names fold at `/`, then columns are left out.

    Where not even that makes room for whole words, each row is a paragraph of its own.

    Attributes:
        columns: Their titles; none is shown if `titled` is false.
        right: Titles of columns aligned to the right, whose cells never fold.
        drop: Titles of columns that may be left out, in this order, before a word would have to be broken.
    """

    columns: Sequence[str]
    right: Sequence[str] = ()
    drop: Sequence[str] = ()
    titled: bool = True
    rows: list[tuple[Styled, ...]] = field(default_factory=list)

    def add_row(self, *cells: Cell) -> None:
        """Adds a row; cells that are missing at its end are empty."""
        styled = [cell if isinstance(cell, Styled) else Styled(cell) for cell in cells]
        safe = [cell._replace(text=printable(cell.text)) for cell in styled]
        self.rows.append((*safe, *[Styled("")] * (len(self.columns) - len(safe))))

    def left_out(self, width: int) -> list[str]:
        """Returns the titles of the columns that have no place in a width."""
        for n in range(len(self.drop) + 1):
            gone = list(self.drop[:n])
            kept = self._kept(gone)
            if sum(self._least(i) for i in kept) + GAP * (len(kept) - 1) <= width:
                return [title for title in gone if title in self.columns]
        return []

    def lines(self, width: int) -> Iterator[list[Styled]]:
        """Yields the table's lines, each a list of pieces of text."""
        kept = self._kept(self.left_out(width))
        least = [self._least(i) for i in kept]
        room = width - GAP * (len(kept) - 1)
        if sum(least) > room and self.titled and len(kept) > 1:
            yield from self._paragraphs(width)
            return
        wanted = [max((_width(cell) for cell in self._cells(i)), default=0) for i in kept]
        widths = _shared(least, wanted, room)
        head = [tuple(Styled(name, bold=True) for name in self.columns)] if self.titled else []
        for row in [*head, *self.rows]:
            folded = [folds(row[i].text, widths[at]) for at, i in enumerate(kept)]
            for n in range(max(map(len, folded), default=0)):
                texts = [lines[n] if n < len(lines) else "" for lines in folded]
                yield [
                    row[i]._replace(text=self._filled(i, text, width, is_last=i == kept[-1]))
                    for i, text, width in zip(kept, texts, widths, strict=True)
                ]

    def _filled(self, column: int, text: str, width: int, *, is_last: bool) -> str:
        """Returns a cell's text as wide as its column, with the gap behind it; the last column ends with its text."""
        space = " " * (width - _width(text))
        if self.columns[column] in self.right:
            text, space = space + text, ""
        return text if is_last else text + space + " " * GAP

    def _paragraphs(self, width: int) -> Iterator[list[Styled]]:
        """Yields the first title, then each row as its first cell, and below it the others with their titles."""
        yield [Styled(self.columns[0], bold=True)]
        for row in self.rows:
            first = next((i for i, cell in enumerate(row) if cell.text.strip()), 0)
            start = len(row[first].text) - len(row[first].text.lstrip())
            yield from ([Styled(line, bold=True)] for line in folds(row[first].text, width))
            for i, cell in enumerate(row):
                if i != first and cell.text.strip():
                    text = " " * (start + 2) + f"{self.columns[i]}: {cell.text.strip()}"
                    yield from ([Styled(line)] for line in folds(text, width))

    def _kept(self, gone: Sequence[str]) -> list[int]:
        return [i for i, name in enumerate(self.columns) if name not in gone]

    def _cells(self, i: int) -> list[str]:
        return [*([self.columns[i]] if self.titled else []), *(row[i].text for row in self.rows)]

    def _least(self, i: int) -> int:
        """Returns the least width of a column in which nothing is broken that belongs together."""
        if self.columns[i] in self.right:
            return max(map(_width, self._cells(i)), default=0)
        return max((_least(cell) for cell in self._cells(i)), default=0)


@dataclass(frozen=True)
class Screen:
    """Where text for people goes. It is the one place that makes text printable: names from files may hold anything."""

    width: int
    colour: bool

    def say(self, text: str = "", bold: bool = False, indent: int = 0, fold: bool = True) -> None:
        """Prints a paragraph, or an empty line; `fold` is false for code, which has to stay in one line."""
        safe = " " * indent + printable(text)
        hang = indent + 2 if indent else 0
        for line in folds(safe, self.width, hang) if fold else [safe]:
            self._line([Styled(line, bold)])

    def title(self, text: str) -> None:
        """Prints the title of a section."""
        self.say()
        self.say(text, bold=True)

    def show(self, table: Table) -> None:
        """Prints a table, and what was left out of it because the terminal is narrow."""
        for line in table.lines(self.width):
            self._line(line)
        gone = table.left_out(self.width)
        if gone:
            self.say(f"Left out at {self.width} columns: {', '.join(gone)}.")

    def show_list(self, title: str, lines: Iterable[str]) -> None:
        """Prints a titled list, or nothing if it is empty. Lines that fold stay indented."""
        kept = list(lines)
        if kept:
            self.title(title)
        for line in kept:
            self.say(from_here(line), indent=2)

    def _line(self, parts: Sequence[Styled]) -> None:
        texts = [part.text for part in parts]
        while texts and not texts[-1].strip():
            texts.pop()
        if texts:
            texts[-1] = texts[-1].rstrip()
        if self.colour:
            styles = zip(parts, texts, strict=False)
            texts = [click.style(text, bold=part.bold or None, dim=part.dim or None) for part, text in styles]
        click.echo("".join(texts))


def screen() -> Screen:
    """Returns the screen on stdout."""
    if not sys.stdout.isatty():
        return Screen(PIPED_WIDTH, colour=False)
    return Screen(shutil.get_terminal_size().columns, colour="NO_COLOR" not in os.environ)


def shown_path(path: Place) -> str:
    """Returns a path as people name it: from the working directory, if it lies there."""
    return from_here(f"{path}/").removesuffix("/") or "."


def from_here(text: str) -> str:
    """Returns text in which paths below the working directory begin there."""
    try:
        here = re.escape(f"{Path.cwd()}/")
    except FileNotFoundError:  # it was removed
        return text
    return re.sub(rf"(?<![^\s\"'`(=]){here}", "", text)


def folded_error(text: str) -> str:
    """Returns an error's text as it goes to stderr: paths from here, and folded between words for a terminal."""
    text = from_here(text)
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(part for line in text.split("\n") for part in folds(line, width, names=False))


_WORD = re.compile(r"( *)((?:(?<!\S)\d+ (?=[a-z])| ?\[[^\[\]]*\]|[^\s\[])+|\[)")
"""What stays together: `3 slots`, `v_row [16, 16]`, and all without spaces; with the blanks before it."""
_PART = re.compile(r"[^/]*/+|[^/]+")


def folds(text: str, width: int, hang: int | None = None, names: bool = True) -> list[str]:
    """Returns text as lines of a width, folded between words; names longer than a line after `/`.

    Args:
        text: Text without line breaks.
        width: Columns.
        hang: Indentation of the lines after the first; two more than the first has, if None.
        names: Whether names may be folded; if not, what is longer than a line stays whole, so that it can be copied.

    Example:
        >>> folds("  encoder/layers_0/attention/query/kernel", 24)
        ['  encoder/layers_0/', '    attention/query/', '    kernel']
        >>> folds("v_row [16], v_col [16], m [16, 16]", 13)
        ['v_row [16],', '  v_col [16],', '  m [16, 16]']
    """
    if _width(text) <= width:
        return [text]
    start = len(text) - len(text.lstrip(" "))
    hang = start + 2 if hang is None else hang
    lines: list[str] = []
    line, empty = " " * start, True
    for glue, word in _WORD.findall(text):
        whole = not names or _width(word) <= width - hang
        for i, part in enumerate([word] if whole else _parts(word)):
            joined = line + ("" if empty or i else glue) + part
            if _width(joined) <= width:
                line, empty = joined, False
                continue
            if not empty:
                lines.append(line)
            line, empty = " " * (hang if lines else start) + part, False
            if names:
                full, line = _cut(line, width, hang)
                lines += full
    return [*lines, line]


def _cut(line: str, width: int, hang: int) -> tuple[list[str], str]:
    """Returns full lines of a width, and the rest, of a line whose one part alone is longer than the width."""
    full = []
    while _width(line) > width > hang + 1:
        fits = next(n for n in range(len(line), 0, -1) if _width(line[:n]) <= width)
        full.append(line[:fits])
        line = " " * hang + line[fits:]
    return full, line


def _parts(word: str) -> list[str]:
    return [word] if word.startswith("[") else _PART.findall(word)


def _least(text: str) -> int:
    start = len(text) - len(text.lstrip(" "))
    words = [part for _, word in _WORD.findall(text) for part in _parts(word)]
    return max(
        (_width(part) + (start + 2 if i else start) for i, part in enumerate(words)), default=_width(text)
    )


def _width(text: str) -> int:
    """Returns the columns that text takes in a terminal."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def _shared(least: list[int], wanted: list[int], width: int) -> list[int]:
    """Returns the widths of columns: as wanted where there is room, else the room shared, none below its least."""
    widths = list(least)
    while sum(widths) > width and max(widths, default=0) > 1:  # a word has to be broken: the longest
        widths[widths.index(max(widths))] -= 1
    spare = width - sum(widths)
    while spare > 0 and (open_ := [i for i, w in enumerate(wanted) if widths[i] < w]):
        for i in open_[:spare]:
            widths[i] += 1
            spare -= 1
    return widths


class Bar(Protocol):
    """The part of rich's Progress that verbs use."""

    def add_task(self, description: str, *, total: float | None = ...) -> Any:
        """Begins a task and returns its id."""

    def update(self, task_id: Any, **changes: Any) -> None:
        """Says how far a task is."""

    def advance(self, task_id: Any) -> None:
        """Says that a task is one step further."""

    def reset(self, task_id: Any, **changes: Any) -> None:
        """Begins a task anew, with its clock, for the next phase of the work."""


@dataclass(frozen=True)
class _NoBar(AbstractContextManager["_NoBar"]):
    def add_task(self, description: str, *, total: float | None = None) -> Any:
        return None

    def update(self, task_id: Any, **changes: Any) -> None:
        pass

    def advance(self, task_id: Any) -> None:
        pass

    def reset(self, task_id: Any, **changes: Any) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def progress(unit: str = "bytes", needed: bool = True) -> AbstractContextManager[Bar]:
    """Returns a progress bar on stderr; a silent one where that is no terminal, or none is needed."""
    if not needed or not sys.stderr.isatty():
        return _NoBar()
    from statekit.cli.progress_bar import bar

    return bar(unit)


@contextmanager
def reading(what: str = "reading") -> Iterator[Callable[[str, int], None]]:
    """Shows on stderr what is read, and how many bytes were.

    Yields:
        What is told a name, and how many bytes are read of it.
    """
    with progress() as bar:
        task, done = bar.add_task(what, total=None), 0

        def tell(name: str, size: int) -> None:
            nonlocal done
            bar.update(task, description=name, completed=done)
            done += size

        yield tell


def print_json(kind: str, data: dict[str, Any]) -> None:
    """Prints one JSON object whose first key, `format`, names what it is: `statekit.<kind>/1`."""
    from statekit.tensors.tree import to_json

    envelope = {"format": f"statekit.{kind}/1", **to_json(data)}
    click.echo(json.dumps(envelope, indent=2, allow_nan=False))
