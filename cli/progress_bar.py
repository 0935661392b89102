"""A progress bar on stderr, by rich, which is imported with this module alone."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from statekit.errors import size

_FIGURES = 50
"""Columns that the figures beside a description take."""


class Amount(ProgressColumn):
    """How much is done, and of how much where that is known."""

    def __init__(self, unit: str) -> None:
        super().__init__(Column(no_wrap=True))
        self._unit = unit

    def render(self, task: Task) -> Text:
        done = self._text(task.completed)
        return Text(done if task.total is None else f"{done} of {self._text(task.total)}")

    def _text(self, amount: float) -> str:
        return size(round(amount)) if self._unit == "bytes" else f"{amount:.0f} {self._unit}"


class Speed(ProgressColumn):
    """How much is done in a second. Stages wait for each other: this is the speed of the slowest."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{size(round(speed))}/s")


class TimeLeft(ProgressColumn):
    """How long it will take from here, where that can be told."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        if left is None or task.finished:
            return Text("")
        minutes, seconds = divmod(round(left), 60)
        return Text(f"{minutes}:{seconds:02} left")


def bar(unit: str) -> Progress:
    """Returns a bar that disappears when it is done; amounts are in `unit`, bytes as sizes with their speed."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    # A line that folds would not be one line when it is drawn again.
    described = Column(no_wrap=True, max_width=max(10, console.width - _FIGURES))
    speed = (Speed(Column(no_wrap=True)),) if unit == "bytes" else ()
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=described),
        BarColumn(),
        Amount(unit),
        *speed,
        TimeLeft(Column(no_wrap=True)),
        console=console,
        transient=True,
    )
