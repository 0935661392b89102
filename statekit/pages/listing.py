"""Parameters as a page lists them: a tree of modules, with what is in each, and all numbers beside it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from statekit.pages import charts
from statekit.pages.module_tree import Module, module_tree, rows

MAX_LISTED = 3000
"""Parameters that are listed one by one; of more, only their modules are."""


@dataclass(frozen=True)
class Listing:
    """Parameters as a tree for a page.

    Attributes:
        root: The tree, of what `inspect` says of each parameter.
        deepest: How many levels of modules are shown; None: all, with their parameters.
        axes: For parameters (`values`) and each slot the exponents of 2 that sparklines go from and to.
    """

    root: Module[Mapping[str, Any]]
    deepest: int | None
    axes: Mapping[str, tuple[int, int]]


def listing(parameters: Sequence[Mapping[str, Any]], most: int = MAX_LISTED) -> Listing:
    """Arranges the parameters that `inspect` lists; modules alone, where there are too many for a page."""
    root = module_tree((parameter["path"], parameter) for parameter in parameters)
    ends: dict[str, list[int]] = {}
    for parameter in parameters:
        for name, tensor in (("values", parameter), *parameter["slots"].items()):
            binned = tensor.get("stats", {}).get("magnitudes")
            if binned:
                first = binned["from"]
                ends.setdefault(name, []).extend((first, first + binned["octaves"] * len(binned["counts"])))
    axes = {name: (min(values), max(values)) for name, values in ends.items()}
    if len(parameters) <= most:
        return Listing(root, None, axes)
    shown, _ = rows(root, most)
    return Listing(root, max((row.depth for row in shown), default=0), axes)


def numbers(parameters: Sequence[Mapping[str, Any]]) -> str:
    """Returns a CSV of every parameter and slot that `inspect` lists."""
    stats = ("norm", "rms", "min", "max", "zeros", "nan", "inf")
    table = charts.Plot(
        "parameters", "", "", Markup(""), "", ("parameter", "slot", "shape", "dtype", "bytes", *stats),
        tuple(
            (parameter["path"], slot, "x".join(map(str, t["shape"])), t["dtype"], t["bytes"],
             *(_plain(t["stats"][name]) if "stats" in t else None for name in stats))
            for parameter in parameters
            for slot, t in (("", parameter), *parameter["slots"].items())
        ),
    )  # fmt: skip
    return table.csv()


def _plain(value: float | Mapping[str, str] | None) -> charts.Cell:
    """Returns a number of a statistic; JSON has NaN and infinities as text, which is returned as it is."""
    return value["$float"] if isinstance(value, Mapping) else value


def all_numbers(parameters: Sequence[Mapping[str, Any]]) -> str:
    """Returns a link that holds the CSV of `numbers`."""
    return f"data:text/csv;base64,{b64encode(numbers(parameters).encode()).decode()}"


def inside(module: Module[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the number of parameters in and below a module, and the bytes of them and of their slots."""
    parameters = list(module.everything())
    slots = sum(slot["bytes"] for parameter in parameters for slot in parameter["slots"].values())
    return {
        "count": len(parameters),
        "bytes": sum(parameter["bytes"] for parameter in parameters),
        "slot_bytes": slots,
    }


def total_magnitudes(parameters: Sequence[Mapping[str, Any]]) -> list[charts.Plot]:
    """Returns a histogram of all parameters together and one of each slot, from their statistics."""
    counts: dict[str, dict[int, float]] = {}
    for parameter in parameters:
        for name, tensor in (("values", parameter), *parameter["slots"].items()):
            binned = tensor.get("stats", {}).get("magnitudes")
            bins = counts.setdefault(name, {}) if "stats" in tensor else {}
            for i, count in enumerate(binned["counts"] if binned else ()):
                for n in range(binned["octaves"]):
                    at = binned["from"] + i * binned["octaves"] + n
                    bins[at] = bins.get(at, 0) + count / binned["octaves"]
    plots = []
    for name, bins in counts.items():
        if bins:
            first, last = min(bins), max(bins)
            wide = -(-(last - first + 1) // 32)
            heights = [
                round(sum(bins.get(first + i * wide + n, 0) for n in range(wide)))
                for i in range((last - first) // wide + 1)
            ]
            binned = {"from": first, "octaves": wide, "counts": heights}
            title = "All parameters" if name == "values" else f"Slot {name} of all parameters"
            plots.append(
                charts.magnitudes(title, "|x| of every value x that is neither zero nor NaN", binned)
            )
    return plots
