"""Plots of one parameter and its slots, of a region, of its numbers over a run, and of where two checkpoints differ.

Input: the records of `statekit.statistics` and `statekit.conversion.closer`, as JSON has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from statekit.pages import charts
from statekit.pages.charts import Plot, number
from statekit.statistics.change import FIGURES


def of_tensor(name: str, tensor: Mapping[str, Any]) -> list[Plot]:
    """Returns the plots of a parameter's values or of one of its slots: of a small vector one, with every value."""
    called = _called(name)
    cells, plots = _cells(called, f"|{called}|", tensor), []
    if tensor.get("bars", {}).get("each") == 1:
        return cells
    span = tensor["linear"]
    if span is not None:
        edges = _edges(span["low"], span["high"], len(span["counts"]))
        title = f"Values of {called}"
        plots.append(charts.histogram(title, f"{called}, every finite value", called, edges, span["counts"]))
    if tensor["stats"]["magnitudes"] is not None:
        plots.append(
            charts.magnitudes(
                f"Magnitudes of {called}", f"|{called}|, every finite value", tensor["stats"]["magnitudes"]
            )
        )
    return plots + cells


def _edges(low: float, high: float, count: int) -> list[float]:
    """Returns the edges of equal bins between two numbers, whose difference may be more than float64 holds."""
    if math.isinf(high - low):
        return [low * (1 - i / count) + high * (i / count) for i in range(count + 1)]
    return [low + (high - low) * i / count for i in range(count + 1)]


def _cells(
    called: str, unit: str, record: Mapping[str, Any], formula: str = "", first: tuple[int, int] = (0, 0)
) -> list[Plot]:
    if "tiles" in record:
        tiles = record["tiles"]
        tall, wide = tiles["each"]
        rows, columns = tiles["shape"]
        mean = f"mean {unit} of each {tall} by {wide} values" if tall * wide > 1 else unit
        caption = f"{formula}; {mean}" if formula else mean
        return [
            charts.heat_map(
                f"Where {called} is large", caption, unit, tiles["cells"], (rows, columns), first=first
            )
        ]
    per_bar, values = record["bars"]["each"], record["bars"]["values"]
    unit = called if unit == f"|{called}|" else unit
    mean = f"mean of each {per_bar} values" if per_bar > 1 else unit
    caption = f"{formula}; {mean}" if formula else mean
    if len(values) > 1:
        return [
            charts.bars(
                f"{called}, value by value", caption, unit, "index", values, each=per_bar, first=first[1]
            )
        ]
    return []


def of_figure(figure: Mapping[str, Any]) -> Plot | None:
    """Returns the plot of a figure; None of one that is numbers alone."""
    title, formula, kind = figure["title"], figure["formula"], figure["kind"]
    if kind == "cells":
        return next(iter(_cells(figure["unit"], figure["unit"], figure, formula)), None)
    if kind == "quantiles" and figure["values"]:
        shares, values = zip(*figure["values"], strict=True)
        percents = [100 * share for share in shares]
        return charts.lines(
            title, formula, figure["unit"], {figure["unit"]: values}, percents,
            index="percent of its elements that have less", powers=min(values) > 0,
        )  # fmt: skip
    if kind == "magnitudes" and figure["binned"] is not None:
        binned = figure["binned"]
        edges = [binned["from"] + i * binned["octaves"] for i in range(len(binned["counts"]) + 1)]
        return charts.histogram(
            title, formula, "|u| / |p|", edges, binned["counts"], base=2,
            marks={number(figure["guide"]): math.log2(figure["guide"])},
            note="zeros aren't in it; the line is where healthy runs have it, by a rule of thumb",
        )  # fmt: skip
    return None


def of_run(record: Mapping[str, Any], tensor: str = "") -> list[Plot]:
    """Returns what became of a parameter over the steps of its run.

    Args:
        record: What `over_steps` says.
        tensor: `values` or a slot, to see it alone; all, with what the rule makes of them, if it is empty.
    """
    steps, curves = record["updates"], record["curves"]
    updates = {name: values for name, values in curves.items() if name.startswith("update_")}
    others = {name: values for name, values in curves.items() if name not in updates}
    plots = []
    if updates and not tensor:
        titles = {"update_at_zero": "g = 0", "update_at_scale": "g = sqrt(v̂)"}
        plots.append(
            charts.lines(
                "Update over parameter",
                "rms(u) / rms(p), u the next update by the state's own rule",
                "rms(u) / rms(p)",
                {titles.get(name, name): values for name, values in updates.items()},
                steps,
                powers=True,
                guides={number(record["guide"]): record["guide"]},
            )
        )
    changes = {name: changed_part for name, changed_part in record["changes"].items() if tensor in ("", name)}
    for figure, (title, powers) in _CHANGES.items() if len(steps) > 1 else ():
        curve = {_called(name): change[figure] for name, change in changes.items()}
        plots.append(charts.lines(title, FIGURES[figure], figure, curve, steps, powers=powers))
    plots += [
        charts.lines(name, name, name, {name: values}, steps, powers=True)
        for name, values in others.items()
        if tensor in ("", name.removeprefix("rms(").removesuffix(")"))
    ]
    return plots


_CHANGES = {
    "relative": ("How far from the step before", True),
    "cosine": ("How much it points where it did a step before", False),
    "moved": ("Elements that moved since the step before", False),
}
"""Titles of the figures of a change, and whether their heights are powers of ten."""


def _called(name: str) -> str:
    """Returns what a tensor is called in formulas."""
    return "p" if name == "values" else name


def of_region(record: Mapping[str, Any]) -> list[Plot]:
    """Returns what a region of a parameter or slot looks like: its picture, and the histogram of its magnitudes."""
    called = _called(record["slot"] or "values")
    top, _bottom, left, _right = record["region"]
    plots = _cells(called, f"|{called}|", record, first=(top, left))
    binned = record["stats"]["magnitudes"]
    title = f"Magnitudes of this region of {called}"
    return [*plots, charts.magnitudes(title, f"|{called}|, every finite value of the region", binned)]


def of_difference(record: Mapping[str, Any]) -> list[Plot]:
    """Returns where a tensor of one checkpoint isn't that of another."""
    called = _called(record["slot"] or "values")
    binned = record["stats"]["magnitudes"]
    plots = [charts.magnitudes(f"How far {called} is apart", "|A - B|, in float64", binned)]
    return plots + _cells(f"|A - B| of {called}", "|A - B|", record)
