"""How far a tensor is from what it was: of one parameter or slot, from a step of a run to the next."""

from __future__ import annotations

import math

import numpy as np

from statekit.tensors.tensor import Array, Tensor, blocks

FIGURES = {
    "relative": "rms(x - y) / rms(y), y as the step before has it",
    "cosine": "sum(x y) / (|x| |y|), y as the step before has it",
    "moved": "share of the elements that aren't those of the step before",
}
"""The figures of a change, with their formulas."""


def change(before: Tensor, after: Tensor) -> dict[str, float | None]:
    """Reads two tensors of one shape and returns the figures of `FIGURES`, in float64.

    An element of which one side isn't finite counts for `moved` alone, and NaN as equal to NaN. None stands where a
    figure has no meaning: nothing is finite, or what it is divided by is zero.
    """
    unequal = count = 0
    apart = square = other = both = 0.0
    for index in blocks(after):
        x, y = after.read(index), before.read(index)
        with np.errstate(invalid="ignore", over="ignore"):
            differ = (x != y) & ~((x != x) & (y != y))  # noqa: PLR0124 - NaN alone isn't itself
            unequal += int(np.count_nonzero(differ))
            count += x.size
            a, b = _finite(x, y)
            apart += float(np.sum((a - b) ** 2))
            square += float(np.sum(b * b))
            other += float(np.sum(a * a))
            both += float(np.sum(a * b))
    figures = {
        "relative": math.sqrt(apart / square) if square else None,
        "cosine": both / (math.sqrt(square) * math.sqrt(other)) if square and other else None,
        "moved": unequal / count if count else None,
    }
    return {
        name: figure if figure is not None and math.isfinite(figure) else None
        for name, figure in figures.items()
    }


def _finite(x: Array, y: Array) -> tuple[Array, Array]:
    """Returns the magnitudes or values of both in float64, where both are finite."""
    a, b = (np.abs(values) if values.dtype.kind == "c" else values for values in (x, y))
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    good = np.isfinite(a) & np.isfinite(b)
    return (a, b) if good.all() else (a[good], b[good])
