"""Plots of one parameter and its slots, of its numbers over a run, and of where two checkpoints differ in it.

In go the records of `statekit.statistics` and `statekit.conversion.closer`, as JSON has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from statekit.pages import charts
from statekit.pages.charts import Plot, number


def of_tensor(name: str, tensor: Mapping[str, Any]) -> list[Plot]:
    """Returns the plots of a parameter's values or of one of its slots."""
    called = "p" if name == "values" else name
    plots = []
    span = tensor["linear"]
    if span is not None:
        count = len(span["counts"])
        edges = [span["low"] + (span["high"] - span["low"]) * i / count for i in range(count + 1)]
        title = f"Values of {called}"
        plots.append(charts.histogram(title, f"{called}, every finite value", called, edges, span["counts"]))
    if tensor["stats"]["magnitudes"] is not None:
        plots.append(
            charts.magnitudes(
                f"Magnitudes of {called}", f"|{called}|, every finite value", tensor["stats"]["magnitudes"]
            )
        )
    return plots + _cells(called, f"|{called}|", tensor)


def _cells(called: str, unit: str, record: Mapping[str, Any], formula: str = "") -> list[Plot]:
    if "tiles" in record:
        tiles = record["tiles"]
        tall, wide = tiles["each"]
        rows, columns = tiles["shape"]
        mean = f"mean {unit} of each {tall} by {wide} values" if tall * wide > 1 else unit
        made = f"{formula}; {mean}" if formula else mean
        return [charts.heat_map(f"Where {called} is large", made, unit, tiles["cells"], (rows, columns))]
    each, values = record["bars"]["each"], record["bars"]["values"]
    unit = unit.strip("|")
    mean = f"mean of each {each} values" if each > 1 else unit
    made = f"{formula}; {mean}" if formula else mean
    return (
        [charts.bars(f"{called}, value by value", made, unit, "index", values, each=each)]
        if len(values) > 1
        else []
    )


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


def of_run(record: Mapping[str, Any]) -> list[Plot]:
    """Returns what became of a parameter over the steps of its run."""
    steps, curves = record["updates"], record["curves"]
    updates = {name: values for name, values in curves.items() if name.startswith("update_")}
    others = {name: values for name, values in curves.items() if name not in updates}
    plots = []
    if updates:
        said = {"update_at_zero": "g = 0", "update_at_scale": "g = sqrt(v̂)"}
        plots.append(
            charts.lines(
                "Update over parameter",
                "rms(u) / rms(p), u the next update by the state's own rule",
                "rms(u) / rms(p)",
                {said.get(name, name): values for name, values in updates.items()},
                steps,
                powers=True,
                guides={number(record["guide"]): record["guide"]},
            )
        )
    plots += [
        charts.lines(name, name, name, {name: values}, steps, powers=True) for name, values in others.items()
    ]
    return plots


def of_difference(record: Mapping[str, Any]) -> list[Plot]:
    """Returns where a tensor of one checkpoint isn't that of another."""
    called = record["slot"] or "p"
    binned = record["stats"]["magnitudes"]
    plots = [charts.magnitudes(f"How far {called} is apart", "|A - B|, in float64", binned)]
    return plots + _cells(f"|A - B| of {called}", "|A - B|", record)
