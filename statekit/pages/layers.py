"""Curves by layer: how large parameters and slots are along a model's depth, from what `inspect --stats` says of each.

A layer is a module whose name ends in a number and that stands beside others of that name: `layers_0`, `h/11`. All
of one name are a stack. Of a stack inside of another, as in `block/0/layer/1`, the outer one has the layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statekit.pages import charts
from statekit.pages.charts import Plot
from statekit.pages.module_tree import DEEPEST

_NUMBERED = re.compile(r"(.*?)(\d{1,9})", re.DOTALL)
MOST_LAYERS = 10_000
MEASURES = {"norm": "|x|, the Euclidean norm", "rms": "rms(x), the root of the mean square"}
"""What is drawn of a layer's values, with the formula."""


@dataclass(frozen=True)
class Layers:
    """A model's parameters by layer.

    Attributes:
        curves: For parameters (`values`) and each slot, by stack, the sum of the squares and the count of values in
            each layer.
        parts: What every layer has, as one can look at it alone: the names of its parameters in it.
    """

    curves: Mapping[str, Mapping[str, Mapping[int, tuple[float, int]]]]
    parts: tuple[str, ...]

    def plots(self, measure: str = "norm") -> list[Plot]:
        """Returns a plot for the parameters and for each slot, with a curve for each stack."""
        plots = []
        for name, stacks in self.curves.items():
            layers = sorted({layer for stack in stacks.values() for layer in stack})
            heights = {
                stack: [_height(by_layer.get(layer), measure) for layer in layers]
                for stack, by_layer in stacks.items()
            }
            called = "Parameters" if name == "values" else f"Slot {name}"
            plots.append(
                charts.lines(
                    f"{called} by layer", f"{MEASURES[measure]}, of all values x in a layer", measure, heights,
                    layers, index="layer", powers=True,
                )
            )  # fmt: skip
        return plots

    def to_json(self, measure: str = "norm") -> dict[str, Any]:
        """Returns what the plots show as plain data: for each tensor and stack a number by layer."""
        return {
            name: {
                stack: {str(layer): _height(cell, measure) for layer, cell in sorted(by_layer.items())}
                for stack, by_layer in stacks.items()
            }
            for name, stacks in self.curves.items()
        }


def by_layer(parameters: Sequence[Mapping[str, Any]], part: str = "") -> Layers:
    """Puts parameters together by layer; empty where there are no stacks, or nothing was measured.

    Args:
        parameters: What `inspect` says of each, with statistics.
        part: Only the parameter of this name in each layer; all, if it is empty.

    Example:
        >>> each = [{"path": f"h/{i}/w", "shape": [2], "slots": {}, "stats": {"norm": 5.0, "nan": 0, "inf": 0}}
        ...         for i in range(2)]
        >>> by_layer(each).curves
        {'values': {'h': {0: (25.0, 2), 1: (25.0, 2)}}}
    """
    placed = [
        (where, parameter)
        for parameter in parameters
        if "stats" in parameter and (where := _place(parameter["path"]))
    ]
    layers: dict[str, set[int]] = {}
    for (stack, layer, _), _one in placed:
        layers.setdefault(stack, set()).add(layer)
    curves: dict[str, dict[str, dict[int, tuple[float, int]]]] = {}
    parts: dict[str, None] = {}
    for (stack, layer, inner), placed_parameter in placed:
        if not 2 <= len(layers[stack]) <= MOST_LAYERS:
            continue
        parts[inner] = None
        if part and inner != part:
            continue
        for name, tensor in (("values", placed_parameter), *placed_parameter["slots"].items()):
            stats = tensor["stats"]
            count = math.prod(tensor["shape"]) - stats["nan"] - stats["inf"]
            norm = stats["norm"]
            square = float(norm) ** 2 if isinstance(norm, int | float) else math.inf
            before = curves.setdefault(name, {}).setdefault(stack, {}).get(layer, (0.0, 0))
            curves[name][stack][layer] = (before[0] + square, before[1] + count)
    return Layers(curves, tuple(parts))


def _place(path: str) -> tuple[str, int, str] | None:
    """Returns a parameter's stack, layer, and name inside of the layer; None of one that is in no numbered module."""
    *modules, leaf = re.split(r"[/.]", path, maxsplit=DEEPEST)
    for i, module in enumerate(modules):
        numbered = _NUMBERED.fullmatch(module)
        if numbered is not None:
            stack = "/".join([*modules[:i], numbered[1].rstrip("_-")]).rstrip("/") or "layers"
            return stack, int(numbered[2]), "/".join([*modules[i + 1 :], leaf])
    return None


def _height(cell: tuple[float, int] | None, measure: str) -> float | None:
    if cell is None or not math.isfinite(cell[0]) or not cell[1]:
        return None
    return math.sqrt(cell[0] / cell[1] if measure == "rms" else cell[0])
