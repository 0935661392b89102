"""Plots as SVG that the server draws, each with its formula, its axes in words and a table of its numbers.

Colours stand in the picture, so that it is whole by itself, and in the style sheet by class, which has them for dark
screens too: CSS goes before attributes.
"""

from __future__ import annotations

import csv
import io
import math
import re
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from statekit.errors import printable
from statekit.tensors.tensor import Array

WIDTH, HEIGHT = 520, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 14, 14, 50
_BINS = 32
_LEAST_SPAN = 1e-300
"""Of numbers that are nearer to each other no steps are made: these would be zero."""
COLOURS = ("#0b62b0", "#b3541e", "#2d7d46", "#8540a5", "#a8324a", "#5c6670")
"""Of curves, in their order; also those of the style sheet's classes `c0` to `c5`, on paper."""
_INK, _FAINT, _PAPER = "#1c2430", "#c9d1da", "#ffffff"

Cell = str | int | float | None


@dataclass(frozen=True)
class Plot:
    """A picture with all that is needed to trust it.

    Attributes:
        name: What its files are called.
        title: What it shows.
        formula: How its numbers come about.
        picture: The picture as SVG, whole by itself.
        summary: What it shows, in a sentence, for who can't see it.
        columns: Titles of its numbers.
        rows: Its numbers.
        image: The same as PNG, of a heat map: a pixel for each cell.
        note: What else has to be known of it.
        curves: Of curves, what a script needs to draw them anew, to be read off and zoomed into: as JSON has it.
    """

    name: str
    title: str
    formula: str
    picture: Markup
    summary: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    image: bytes | None = None
    note: str = ""
    curves: Mapping[str, Any] | None = None

    def csv(self) -> str:
        """Returns its numbers as CSV, with all their digits; no cell begins a formula of a spreadsheet."""
        output = io.StringIO()
        writer = csv.writer(output, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_cell(cell) for cell in row] for row in self.rows)
        return output.getvalue()

    def files(self) -> dict[str, bytes]:
        """Returns what it may be taken along as, by the name of the file."""
        contents = {f"{self.name}.csv": self.csv().encode(), f"{self.name}.svg": str(self.picture).encode()}
        return contents if self.image is None else {**contents, f"{self.name}.png": self.image}

    def links(self) -> dict[str, str]:
        """Returns links that hold those files themselves, by their names."""
        kinds = {"csv": "text/csv", "svg": "image/svg+xml", "png": "image/png"}
        return {
            name: f"data:{kinds[name.rpartition('.')[2]]};base64,{b64encode(content).decode()}"
            for name, content in self.files().items()
        }


def _cell(cell: Cell) -> str:
    if cell is None:
        return ""
    if not isinstance(cell, str):
        return repr(cell)
    text = printable(cell)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def number(value: float | None, digits: int = 4) -> str:
    """Returns a number for people.

    Example:
        >>> number(0.000123456), number(12.0), number(None), number(12_000_000)
        ('0.0001235', '12', '-', '12000000')
    """
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def _raised(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _short_number(value: float, step: float = 0.0) -> str:
    """Returns the label of a tick, such as 20k or 3M, with enough digits to differ from the next tick's."""
    digits = 4 if not step or not value else max(4, math.floor(math.log10(abs(value) / step)) + 2)
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit <= abs(value) < 1e12:
            return f"{value / unit:.{digits}g}{name}"
    return f"{value:.{digits}g}"


def slug(text: str) -> str:
    """Returns text as a name of a file or an element of a page.

    Example:
        >>> slug("encoder/layers_0/wi: v_row")
        'encoder-layers_0-wi-v_row'
    """
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")[:80] or "plot"


@dataclass(frozen=True)
class Axis:
    """An axis of a plot: from a number to a number, on a height or width of pixels.

    Attributes:
        title: What it counts, with its unit.
        low: Its least number; with `power`, a power of `base`.
        high: Its greatest.
        start: The pixel of the least.
        end: The pixel of the greatest.
        base: Numbers are powers of it: low and high are exponents. None: they are the numbers themselves.
        whole: It counts things: there is nothing between two whole numbers.
    """

    title: str
    low: float
    high: float
    start: float
    end: float
    base: int | None = None
    whole: bool = False

    def at(self, value: float) -> float:
        """Returns the pixel of a number, or of the exponent of a power."""
        by = 0.5 if math.isinf(self.high - self.low) else 1.0  # half of the span is a number
        span = by * self.high - by * self.low
        return self.start + (self.end - self.start) * ((by * value - by * self.low) / (span or 1.0))

    def ticks(self) -> list[tuple[float, str]]:
        """Returns where its lines stand, and what they are called."""
        span = self.high - self.low
        if not _LEAST_SPAN < span < math.inf:
            return [(self.low, self._called(self.low))]
        step = 10.0 ** math.floor(math.log10(span / 4))
        step *= next(n for n in (1, 2, 5, 10) if span / (step * n) <= 5)
        if self.base is not None or self.whole:
            step = max(1.0, round(step))
        first = math.ceil(self.low / step - 1e-9)
        values = [n * step for n in range(first, first + 12) if n * step <= self.high + step * 1e-9]
        return [(value, self._called(value, step)) for value in values]

    def _called(self, value: float, step: float = 0.0) -> str:
        return _short_number(value, step) if self.base is None else f"{self.base}{_raised(round(value))}"


def histogram(
    title: str,
    formula: str,
    unit: str,
    edges: Sequence[float],
    counts: Sequence[int],
    *,
    base: int | None = None,
    marks: Mapping[str, float] | None = None,
    note: str = "",
) -> Plot:
    """Draws how many values lie where.

    Args:
        title: What it is of.
        formula: How the values come about.
        unit: What the width counts.
        edges: Edges of the bins, one more than there are bins; exponents of `base`, if that is given.
        counts: Values in each bin.
        base: The width counts powers of it.
        marks: Lines that stand upright, by what they mean.
        note: What else has to be known.
    """
    low, high = (edges[0], edges[-1]) if len(edges) > 1 else (0.0, 1.0)
    places = [*(marks or {}).values()]
    across = Axis(unit, min([low, *places]), max([high, *places]), _LEFT, WIDTH - _RIGHT, base)
    up = Axis("values", 0.0, float(max(counts, default=0) or 1), HEIGHT - _BOTTOM, _TOP)
    bars = [
        _bar(across.at(a), across.at(b), up.at(count), up.start)
        for a, b, count in zip(edges, edges[1:], counts, strict=False)
        if count
    ]
    drawn = [_path("".join(bars)), *_marks(across, up, marks or {})]
    shown = [_edge(edge, base) for edge in edges]
    rows = tuple((a, b, count) for a, b, count in zip(shown, shown[1:], counts, strict=False))
    most = max(range(len(counts)), key=counts.__getitem__, default=None)
    summary = (
        "no values"
        if most is None
        else f"{sum(counts)} values; most of them, {counts[most]}, from {shown[most]} to {shown[most + 1]}"
    )
    return _plot(title, formula, (across, up), drawn, summary, ("from", "to", "values"), rows, note)


def magnitudes(title: str, formula: str, binned: Mapping[str, Any] | None) -> Plot:
    """Draws the histogram of magnitudes that statistics have (`statekit.tensors.stats.Stats.magnitudes`)."""
    first, wide, counts = (
        (0, 1, []) if binned is None else (binned["from"], binned["octaves"], binned["counts"])
    )
    edges = [first + i * wide for i in range(len(counts) + 1)]
    return histogram(title, formula, "magnitude", edges, counts, base=2, note="zeros aren't in it")


def bars(
    title: str,
    formula: str,
    unit: str,
    index: str,
    values: Sequence[float | None],
    *,
    each: int = 1,
    first: int = 0,
) -> Plot:
    """Draws a number for each of a row of things, as bars from zero.

    Args:
        title: What it is of.
        formula: How the numbers come about.
        unit: What the height counts.
        index: What the width counts.
        values: The numbers; None where there is none.
        each: How many things one bar stands for.
        first: The number of the first thing.
    """
    good = [value for value in values if value is not None and math.isfinite(value)]
    low, high = min([0.0, *good]), max([0.0, *good])
    across = Axis(index, first, first + len(values) * each, _LEFT, WIDTH - _RIGHT, whole=True)
    up = Axis(unit, low, high if high > low else low + 1, HEIGHT - _BOTTOM, _TOP)
    drawn = [
        _bar(across.at(first + i * each), across.at(first + (i + 1) * each), up.at(value), up.at(0.0))
        for i, value in enumerate(values)
        if value is not None and math.isfinite(value) and value != 0
    ]
    rows = tuple((first + i * each, value) for i, value in enumerate(values))
    summary = (
        f"{len(values)} bars from {number(min(good, default=None))} to {number(max(good, default=None))}"
    )
    return _plot(title, formula, (across, up), [_path("".join(drawn))], summary, (index, unit), rows)


def _ends(curves: Mapping[str, Sequence[float | None]]) -> str:
    """Says the first and the last number of each curve."""
    return "; ".join(
        f"{name}: {number(values[0])} first, {number(values[-1])} last"
        for name, values in curves.items()
        if values
    )


def lines(
    title: str,
    formula: str,
    unit: str,
    curves: Mapping[str, Sequence[float | None]],
    steps: Sequence[float],
    *,
    index: str = "updates done",
    powers: bool = False,
    guides: Mapping[str, float] | None = None,
    note: str = "",
) -> Plot:
    """Draws numbers over the steps of a run.

    Args:
        title: What it is of.
        formula: How the numbers come about.
        unit: What the height counts.
        curves: The numbers of each curve, one for each step; None where there is none.
        steps: Where they stand.
        index: What the width counts.
        powers: Whether the height counts powers of ten; what isn't positive is left out of the picture then.
        guides: Level lines, by what they mean.
        note: What else has to be known.
    """
    heights = {name: [_height(value, powers) for value in values] for name, values in curves.items()}
    guides = dict(guides or {})
    levels = {name: _height(value, powers) for name, value in guides.items()}
    low, high = _range([*heights.values(), list(levels.values())], powers)
    whole = all(isinstance(step, int) for step in steps)
    if powers and any(0 in values for values in curves.values()):
        note = f"{note}; zeros aren't drawn" if note else "zeros aren't drawn"
    across = Axis(index, min(steps, default=0), max(steps, default=1), _LEFT, WIDTH - _RIGHT, whole=whole)
    up = Axis(unit, low, high, HEIGHT - _BOTTOM, _TOP, 10 if powers else None)
    drawn = _drawn(heights, levels, steps, across, up)
    rows = tuple((step, *(values[i] for values in curves.values())) for i, step in enumerate(steps))
    plot = _plot(title, formula, (across, up), drawn, _ends(curves), (index, *curves), rows, note)
    again = {
        "index": index, "unit": unit, "powers": powers, "whole": whole, "at": list(steps),
        "curves": {
            name: [_drawable(value, powers) for value in values] for name, values in curves.items()
        },
        "guides": guides,
    }  # fmt: skip
    return replace(plot, curves=again)


def _drawn(
    heights: Mapping[str, Sequence[float | None]],
    levels: Mapping[str, float | None],
    steps: Sequence[float],
    across: Axis,
    up: Axis,
) -> list[str]:
    """Returns curves with their legends, and level lines with their names."""
    drawn: list[str] = []
    for i, (name, curve) in enumerate(heights.items()):
        points = [(across.at(x), up.at(h)) for x, h in zip(steps, curve, strict=True) if h is not None]
        drawn += _curve(points, i)
        if len(heights) > 1:
            drawn += _legend(name, i)
    for name, height in levels.items():
        if height is not None:
            y = up.at(height)
            drawn += [
                _rule(across.start, y, across.end, y),
                _text(across.end - 4, y - 5, name, "end", halo=True),
            ]
    return drawn


def _drawable(value: float | None, powers: bool) -> float | None:
    return None if _height(value, powers) is None else value


def _range(heights: Sequence[Sequence[float | None]], powers: bool) -> tuple[float, float]:
    """Returns the lowest and the highest of what is drawn, apart enough that an axis has a length."""
    good = [height for curve in heights for height in curve if height is not None]
    low, high = min(good, default=0.0), max(good, default=1.0)
    if powers:
        return math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    if low == high:
        return low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    return low, high


def _curve(points: Sequence[tuple[float, float]], number_of_curve: int) -> list[str]:
    """Returns a line through some points, and a dot on each."""
    colour, kind = COLOURS[number_of_curve % len(COLOURS)], f"c{number_of_curve % len(COLOURS)}"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    line = f'<polyline class="line {kind}" points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    dots = [
        f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points
    ]
    return [line, *dots]


def _legend(name: str, number_of_curve: int) -> list[str]:
    """Returns a curve's dot and name, in a row of its own."""
    colour, kind = COLOURS[number_of_curve % len(COLOURS)], f"c{number_of_curve % len(COLOURS)}"
    row = _TOP + 12 + 16 * number_of_curve
    dot = f'<circle class="dot {kind}" cx="{_LEFT + 12}" cy="{row - 4}" r="4" fill="{colour}"/>'
    return [dot, _text(_LEFT + 22, row, name)]


def _table(cells: Sequence[Sequence[float | None]]) -> Array:
    """Returns cells as a matrix, with NaN for None; a single NaN if there are no cells."""
    rows = [[math.nan if value is None else value for value in row] for row in cells]
    table = np.array(rows, np.float64)
    return table if table.size else np.full((1, 1), math.nan)


def heat_map(
    title: str,
    formula: str,
    unit: str,
    cells: Sequence[Sequence[float | None]],
    shape: tuple[int, int],
    *,
    first: tuple[int, int] = (0, 0),
) -> Plot:
    """Draws a matrix as colours, a cell for each of its tiles; zeros have the colour of the least magnitude.

    Args:
        title: What it is of.
        formula: What a cell is of its tile.
        unit: What the colours count, in powers of ten.
        cells: The cells, row by row; None where no value is finite.
        shape: Rows and columns that the cells are of.
        first: The first row and column of them, where they are a region of a larger matrix.
    """
    table = _table(cells)
    with np.errstate(divide="ignore"):
        heights = np.log10(np.abs(table))
    heights[~np.isfinite(heights) & ~np.isnan(heights)] = -math.inf
    good = heights[np.isfinite(heights)]
    low, high = (float(good.min()), float(good.max())) if good.size else (0.0, 1.0)
    shade = np.clip((heights - low) / ((high - low) or 1.0), 0, 1)
    pixels = _coloured(shade)
    image = png(pixels)
    rows, columns = shape
    (top, left), (low_end, right) = first, (first[0] + rows, first[1] + columns)
    across = Axis(_counted("columns", left, right), left, right, _LEFT, WIDTH - _RIGHT - 80, whole=True)
    down = Axis(_counted("rows", top, low_end), top, low_end, _TOP, HEIGHT - _BOTTOM, whole=True)
    legend = Axis(unit, low, high, HEIGHT - _BOTTOM, _TOP, None)
    drawn = [_image(image, (across.start, down.start), (across.end, down.end))]
    ramp = png(_coloured(np.linspace(1, 0, 64)[:, None]))
    ramp_left = WIDTH - _RIGHT - 66
    drawn.append(_image(ramp, (ramp_left, _TOP), (ramp_left + 12, HEIGHT - _BOTTOM)))
    for value, _ in legend.ticks():
        drawn.append(_text(ramp_left + 16, legend.at(value) + 4, _short_number(10**value)))
    drawn.append(_text(WIDTH - _RIGHT, HEIGHT - _BOTTOM + 34, unit, "end"))
    numbers = tuple((i, *row) for i, row in enumerate(cells))
    column_labels = tuple(str(i) for i in range(len(cells[0]) if cells else 0))
    summary = f"{len(cells)} by {len(column_labels)} cells of a {rows} by {columns} matrix"
    if good.size:
        summary += f", {unit} from {number(10**low)} to {number(10**high)}"
    return _plot(
        title,
        formula,
        (across, down),
        drawn,
        summary,
        ("row of cells", *column_labels),
        numbers,
        image=image,
        grid=False,
    )


def _counted(name: str, first: int, end: int) -> str:
    return f"{name} ({end})" if not first else f"{name} {first} to {end - 1}"


def sparkline(binned: Mapping[str, Any] | None, axis: tuple[int, int] | None = None) -> Markup:
    """Draws a histogram of magnitudes as small as a word.

    Args:
        binned: As statistics have it.
        axis: The exponents of 2 that its width goes from and to; its own, if None. What lies below or above counts at
            the ends.
    """
    if binned is None:
        return Markup("")
    first, wide, counts = binned["from"], binned["octaves"], binned["counts"]
    low, high = axis or (first, first + wide * len(counts))
    per_bin = max(1, -(-(high - low) // _BINS))
    shown = [0.0] * _BINS
    for i, count in enumerate(counts):
        for n in range(wide):
            at = (first + i * wide + n - low) // per_bin
            shown[min(max(at, 0), _BINS - 1)] += count / wide
    most = max(shown) or 1.0
    path = "".join(
        f"M{3 * i} 20v-{max(1, round(20 * value / most))}h2v{max(1, round(20 * value / most))}z"
        for i, value in enumerate(shown)
        if value
    )
    label = f"magnitudes from 2^{first} to 2^{first + wide * len(counts)}"
    return Markup(
        f'<svg class="spark" role="img" aria-label="{label}" viewBox="0 0 96 20" width="96" height="20">'
        f'<path class="bar" fill="{COLOURS[0]}" d="{path}"/></svg>'
    )


_ROW, _BOX, _LANE, _BESIDE = 74, 300, 14, 340
"""Of a lineage in pixels: from row to row, a box' width, from lane to lane, and all that stands beside the lanes."""


def lineage(
    nodes: Mapping[str, tuple[str, str, str]], edges: Iterable[tuple[str, str, str]], now: str | None = None
) -> Markup:
    """Draws what was made of what, from top to bottom: a row for each checkpoint, an arc from each to what it became.

    Args:
        nodes: Of each by its key: what it is called, what stands below that, and where a click leads. Their order is
            that of the rows.
        edges: From a node to a node, and what was done.
        now: The node that the page is of.
    """
    row = {node: number for number, node in enumerate(nodes)}
    links = [(start, end, how) for start, end, how in edges if {start, end} <= row.keys() and start != end]
    lanes = _lanes([(row[start], row[end]) for start, end, _how in links])
    left = 16 + (max(lanes, default=-1) + 1) * _LANE
    drawn = []
    for (start, end, _how), lane in zip(links, lanes, strict=True):
        top, bottom, x = 26 + row[start] * _ROW, 26 + row[end] * _ROW, left - 10 - lane * _LANE
        drawn.append(
            f'<path class="edge" fill="none" stroke="{_INK}" d="M{left} {top}H{x}V{bottom}H{left - 8}"/>'
            f'<path class="bar" fill="{_INK}" d="M{left} {bottom}l-8 -4v8z"/>'
        )
    for node, (name, below, href) in nodes.items():
        y = 4 + row[node] * _ROW
        kind = "node now" if node == now else "node"
        ways = _ways([(how, nodes[start][0]) for start, end, how in links if end == node])
        drawn.append(
            f'<a href="{escape(href)}"><rect class="{kind}" x="{left}" y="{y}" width="{_BOX}" height="44" rx="5" '
            f'fill="{_PAPER}" stroke="{_INK}"/>{_text(left + 10, y + 18, _short(name, 40))}'
            f"{_text(left + 10, y + 35, _short(below, 46))}<title>{_safe(name)}: {_safe(below)}</title></a>"
        )
        drawn.append(_text(left + 10, y - 6, _short(ways, 40)) if ways else "")
    width, height = left + _BESIDE - 30, 10 + len(nodes) * _ROW - 24
    return Markup(
        f'<svg class="lineage" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="group" aria-label="{len(nodes)} checkpoints and what was made of them">'
        f"{''.join(drawn)}</svg>"
    )


def _ways(ways: Sequence[tuple[str, str]]) -> str:
    """Returns what was done to make a checkpoint, and of what: of one among those that hold the same."""
    sources: dict[str, list[str]] = {}
    for how, source in ways:
        sources.setdefault(how, []).append(source)
    same: dict[str, list[str]] = {}
    for how, names in sources.items():
        same.setdefault(" or ".join(names), []).append(how)
    return ", ".join(f"{' and '.join(hows)} of {names}" for names, hows in same.items())


def _lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Returns a lane for each arc between two rows: arcs that share rows have lanes of their own, short ones inside."""
    taken: list[list[tuple[int, int]]] = []
    lanes = [0] * len(spans)
    for number in sorted(range(len(spans)), key=lambda number: abs(spans[number][1] - spans[number][0])):
        first, last = sorted(spans[number])
        free = (i for i, lane in enumerate(taken) if all(last <= a or b <= first for a, b in lane))
        lanes[number] = next(free, len(taken))
        if lanes[number] == len(taken):
            taken.append([])
        taken[lanes[number]].append((first, last))
    return lanes


def of_lineage(
    nodes: Mapping[str, tuple[str, str, str]], edges: Sequence[tuple[str, str, str]], now: str | None = None
) -> Plot:
    """Returns what was made of what as a plot, with a row for each edge; its arguments are those of `lineage`."""
    called = {key: name for key, (name, _below, _href) in nodes.items()}
    rows = tuple(
        (called[end], called[start], label) for start, end, label in edges if {start, end} <= {*called}
    )
    summary = f"{len(nodes)} checkpoints and what was made of them"
    return Plot(
        "lineage",
        "Who was made of whom",
        "",
        lineage(nodes, edges, now),
        summary,
        ("made", "of", "how"),
        rows,
    )


def zoom_grid(
    parts: Sequence[tuple[int, int, int, int]],
    region: tuple[int, int, int, int],
    address: Callable[[tuple[int, int, int, int]], str],
) -> Markup:
    """Returns links over the picture of a region (`heat_map`, or `bars` of a single row), one for each part of it.

    Args:
        parts: First row, row behind the last, first column, column behind the last of each.
        region: The same of what the picture shows.
        address: Where a part is shown.
    """
    top, bottom, left, right = region
    is_row = (top, bottom) == (0, 1)
    across = Axis("", left, right, _LEFT, WIDTH - _RIGHT - (0 if is_row else 80))
    down = Axis("", top, bottom, _TOP, HEIGHT - _BOTTOM)
    drawn = []
    for part in parts:
        first, end, start, stop = part
        x, y = across.at(start), down.at(first)
        rows = "" if is_row else f"rows {first} to {end - 1}, "
        drawn.append(
            f'<a href="{escape(address(part))}" aria-label="{rows}columns {start} to {stop - 1}"><rect x="{x:.1f}" '
            f'y="{y:.1f}" width="{across.at(stop) - x:.1f}" height="{down.at(end) - y:.1f}"/></a>'
        )
    return Markup(
        f'<svg class="grid" viewBox="0 0 {WIDTH} {HEIGHT}" role="group" aria-label="Zoom in">{"".join(drawn)}</svg>'
    )


def png(pixels: Array) -> bytes:
    """Returns an image as PNG.

    Args:
        pixels: Red, green and blue of each, uint8, shape (rows, columns, 3).

    Source: PNG (ISO/IEC 15948), 5.3 chunks and 11.2: 8 bits a channel, colour type 2, no interlace, filter 0.
    """
    rows, columns, _ = pixels.shape
    lines_ = np.zeros((rows, 1 + 3 * columns), np.uint8)
    lines_[:, 1:] = pixels.reshape(rows, -1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(lines_.tobytes(), 6)) + chunk(b"IEND", b"")
    )


_RAMP = np.array(
    [[13, 20, 64], [60, 60, 150], [30, 130, 160], [70, 180, 110], [200, 215, 60], [255, 250, 215]], float
)
"""Colours from the least to the greatest, ever lighter, so that they are told apart without their hue too."""
_NO_VALUE = (128, 128, 128)


def _coloured(shade: Array) -> Array:
    """Returns colours of numbers from 0 to 1; NaN is grey."""
    good = np.nan_to_num(shade, nan=0.0)
    at = np.linspace(0, 1, len(_RAMP))
    pixels = np.stack([np.interp(good, at, _RAMP[:, i]) for i in range(3)], axis=-1)
    pixels[np.isnan(shade)] = _NO_VALUE
    return np.asarray(np.rint(pixels), np.uint8)


def _height(value: float | None, powers: bool) -> float | None:
    if value is None or not math.isfinite(value) or (powers and value <= 0):
        return None
    return math.log10(value) if powers else value


def _edge(edge: float, base: int | None) -> str:
    return number(edge) if base is None else f"{base}^{edge:g}"


def _bar(left: float, right: float, top: float, foot: float) -> str:
    width = max(right - left - (1 if right - left > 4 else 0), 0.5)
    return f"M{left:.1f} {foot:.1f}V{top:.1f}h{width:.1f}V{foot:.1f}z"


def _path(path: str) -> str:
    return f'<path class="bar" fill="{COLOURS[0]}" d="{path}"/>'


def _image(image: bytes, start: tuple[float, float], end: tuple[float, float]) -> str:
    return (
        f'<image x="{start[0]}" y="{start[1]}" width="{end[0] - start[0]}" height="{end[1] - start[1]}" '
        f'preserveAspectRatio="none" image-rendering="pixelated" '
        f'href="data:image/png;base64,{b64encode(image).decode()}"/>'
    )


def _marks(across: Axis, up: Axis, marks: Mapping[str, float]) -> Iterable[str]:
    for name, value in marks.items():
        x = across.at(value)
        yield _rule(x, up.start, x, up.end)
        late = x > (across.start + across.end) / 2
        yield _text(x + (-5 if late else 5), up.end + 12, name, "end" if late else "start", halo=True)


def _rule(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<line class="rule" stroke="{COLOURS[1]}" stroke-dasharray="5 3" x1="{x:.1f}" y1="{y:.1f}" '
        f'x2="{to_x:.1f}" y2="{to_y:.1f}"/>'
    )


def _safe(text: str) -> Markup:
    return escape(printable(text))


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _text(x: float, y: float, text: str, anchor: str = "start", turn: str = "", halo: bool = False) -> str:
    turned = f' transform="{turn}"' if turn else ""
    if halo:  # it may lie over bars
        turned += f' stroke="{_PAPER}" stroke-width="4" paint-order="stroke"'
    return (
        f'<text class="ink{" halo" if halo else ""}" fill="{_INK}" font-family="system-ui, sans-serif" '
        f'font-size="13" x="{x:.1f}" y="{y:.1f}" '
        f'text-anchor="{anchor}"{turned}>{_safe(text)}</text>'
    )


def _plot(
    title: str,
    formula: str,
    axes: tuple[Axis, Axis],
    drawn: Iterable[str],
    summary: str,
    columns: tuple[str, ...],
    rows: tuple[tuple[Cell, ...], ...],
    note: str = "",
    image: bytes | None = None,
    grid: bool = True,
) -> Plot:
    across, up = axes
    foot = max(up.start, up.end)
    parts = []
    for value, called in up.ticks():
        y = up.at(value)
        if grid:
            parts.append(
                f'<line class="grid" stroke="{_FAINT}" x1="{across.start}" x2="{across.end}" '
                f'y1="{y:.1f}" y2="{y:.1f}"/>'
            )
        parts.append(_text(across.start - 6, y + 4, called, "end"))
    for value, called in across.ticks():
        parts.append(_text(across.at(value), foot + 17, called, "middle"))
    middle = (up.start + up.end) / 2
    parts.append(_text((across.start + across.end) / 2, foot + 36, across.title, "middle"))
    parts.append(_text(12, middle, up.title, "middle", f"rotate(-90 12 {middle})"))
    name = slug(title)
    picture = Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{_safe(title)}: {_safe(summary)}"><rect class="paper" fill="{_PAPER}" width="{WIDTH}" '
        f'height="{HEIGHT}"/>{"".join(parts)}{"".join(drawn)}</svg>'
    )
    return Plot(name, title, formula, picture, summary, columns, rows, image, note)
