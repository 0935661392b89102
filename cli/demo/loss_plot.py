"""Losses as a picture: T5X's beside PyTorch's, and how far each way of going on is from T5X."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

WIDTH, HEIGHT, TOP, BOTTOM, GAP = 860, 330, 46, 44, 70
_GREY, _FONT = "#57606a", "font-family='sans-serif' font-size='12'"
Points = Mapping[int, float]
"""Values by update."""


@dataclass(frozen=True)
class Curve:
    """A curve of a panel.

    Attributes:
        name: What it is.
        points: Its values.
        color: Its colour.
        dots: Whether its points are marked, instead of joined.
    """

    name: str
    points: Points
    color: str
    dots: bool = False


@dataclass(frozen=True)
class Panel:
    """A panel of the picture.

    Attributes:
        title: What its height means.
        curves: What is in it.
        powers: Whether its height counts powers of ten.
    """

    title: str
    curves: Sequence[Curve]
    powers: bool = False


def picture(panels: Sequence[Panel], mark: int, caption: str) -> str:
    """Returns panels side by side as SVG.

    Args:
        panels: The panels, over the same updates.
        mark: The update after which the run was converted.
        caption: What is said there.
    """
    width = (WIDTH - GAP * len(panels)) / len(panels)
    lines = [
        line
        for i, panel in enumerate(panels)
        for line in _panel(panel, GAP + i * (width + GAP), width - 20, mark, caption)
    ]
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}'>",
            f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
            *lines,
            "</svg>\n",
        ]
    )


def _heights(panel: Panel) -> list[float]:
    """Returns the heights of all points that a panel shows."""
    values = [value for curve in panel.curves for value in curve.points.values() if value > 0]
    return [log10(value) for value in values] if panel.powers else values


def _panel(panel: Panel, left: float, width: float, mark: int, caption: str) -> Iterator[str]:
    values = _heights(panel)
    updates = [n for c in panel.curves for n in c.points]
    low = floor(min(values, default=0))
    high = max(ceil(max(values, default=0)), low + 1)
    first, last = min(updates), max(updates)

    def x(update: float) -> float:
        return left + width * (update - first) / max(last - first, 1)

    def y(value: float) -> float:
        height = log10(value) if panel.powers else value
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - height) / (high - low)

    yield _text(left - 40, TOP - 26, panel.title, weight="bold")
    ticks = [10.0**n for n in range(low, high + 1)] if panel.powers else _ticks(low, high)
    for tick in ticks:
        label = f"1e{round(log10(tick))}" if panel.powers else f"{tick:g}"
        yield f"<line x1='{left}' x2='{left + width}' y1='{y(tick):.1f}' y2='{y(tick):.1f}' stroke='#d8dee4'/>"
        yield _text(left - 8, y(tick) + 4, label, anchor="end")
    for update in range(first, last + 1, 1 if last - first < 10 else 2):
        yield _text(x(update), HEIGHT - BOTTOM + 18, str(update), anchor="middle")
    yield _text(left + width / 2, HEIGHT - 8, "update", anchor="middle")
    if first < mark:
        at, foot = x(mark + 0.5), HEIGHT - BOTTOM
        dashed = f"stroke='{_GREY}' stroke-dasharray='4 3'"
        yield f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{TOP}' y2='{foot}' {dashed}/>"
        yield _text(at - 6, foot - 8, caption, anchor="end")
    start = left
    for curve in panel.curves:
        places = [(x(n), y(v)) for n, v in curve.points.items() if v > 0]
        yield from _drawn(curve, places)
        yield from _legend(curve, start, TOP - 10)
        start += 36 + 6.5 * len(curve.name)


def _drawn(curve: Curve, places: Sequence[tuple[float, float]]) -> Iterator[str]:
    if curve.dots or len(places) == 1:  # which no line joins
        yield from (f"<circle cx='{a:.1f}' cy='{b:.1f}' r='4' fill='{curve.color}'/>" for a, b in places)
    else:
        joined = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        yield f"<polyline points='{joined}' fill='none' stroke='{curve.color}' stroke-width='2'/>"


def _legend(curve: Curve, left: float, top: float) -> Iterator[str]:
    yield from _drawn(curve, [(left, top - 4), (left + 14, top - 4)][curve.dots :])
    yield _text(left + 22, top, curve.name)


def _ticks(low: int, high: int) -> list[float]:
    distance = max(1, round((high - low) / 4))
    return [float(n) for n in range(low, high + 1, distance)]


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    style = f"{_FONT} font-weight='{weight}' fill='{_GREY}' text-anchor='{anchor}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{text}</text>"
