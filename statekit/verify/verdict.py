"""How far a step of ours is from the recorded one: in ULP, relative to the recorded update, and to the bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from statekit.arrays.intervals import Interval
from statekit.tensors.distance import gap, over, ulp
from statekit.tensors.tensor import Array
from statekit.tensors.tree import report_json


@dataclass(frozen=True)
class Row:
    """One tensor after one update.

    Attributes:
        step: Updates done after it.
        path: The parameter, or `groups/<i>` for the slots of a group as a whole.
        tensor: `param` or the slot's canonical name.
        ulps: Largest difference, in units in the last place of the recorded value's dtype.
        relative: Largest difference over the largest recorded movement of the tensor in this update.
        ratio: Largest difference over the width of the bound; 0 where both are 0.
        typical: Median of the same, over the elements that differ; 0 where none does.
        unequal: Elements that differ.
        width: Largest relative width of the bound over the tensor.
        grain: Median width of the bound over the largest recorded movement: deviations of this part of an update
            are too fine to be noticed. 0 where nothing moved.
        outside: Elements where ours or the recording leaves the bound.
        size: Elements.
        example: For the worst such element: its index, what was recorded, what we got, the bound.
    """

    step: int
    path: str
    tensor: str
    ulps: float
    relative: float
    ratio: float
    typical: float
    unequal: int
    width: float
    grain: float
    outside: int
    size: int
    example: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the row as plain data; what isn't finite becomes a string."""
        data: dict[str, Any] = report_json(asdict(self))
        return data


def compare(
    step: int, path: str, tensor: str, ours: Array, recorded: Array, before: Array, bound: Interval
) -> Row:
    """Compares one tensor element by element.

    Args:
        step: Updates done.
        path: The parameter.
        tensor: `param` or a slot's name.
        ours: What our step gave.
        recorded: What the original gave; its dtype sets the ULP.
        before: What was recorded before the update.
        bound: What arithmetic of the declared kind can give.
    """
    if ours.shape != recorded.shape or recorded.size == 0:
        wrong = int(ours.shape != recorded.shape)
        return Row(
            step=step,
            path=path,
            tensor=tensor,
            ulps=0.0,
            relative=0.0,
            ratio=0.0,
            typical=0.0,
            unequal=0,
            width=0.0,
            grain=0.0,
            outside=wrong,
            size=recorded.size,
            example="shape",
        )
    computed, original, old = (x.astype(np.float64) for x in (ours, recorded, before))
    with np.errstate(all="ignore"):
        outside = ~(bound.encloses(computed) & bound.encloses(original))
        apart = gap(computed, original)
        moved = float(np.max(np.nan_to_num(np.abs(original - old), nan=0.0, posinf=0.0)))
        width = np.nan_to_num(bound.high - bound.low, nan=0.0, posinf=0.0)
        ratio = over(apart, width)
        size = np.nan_to_num(np.maximum(np.abs(bound.low), np.abs(bound.high)), nan=0.0, posinf=0.0)
        return Row(
            step,
            path,
            tensor,
            ulps=float(np.max(over(apart, ulp(original, recorded.dtype)))),
            relative=float(over(np.max(apart), np.asarray(moved))),
            ratio=float(np.max(ratio)),
            typical=float(np.median(ratio[apart > 0])) if apart.any() else 0.0,
            unequal=int(np.count_nonzero(apart)),
            width=float(np.max(over(width, size))),
            grain=float(np.median(width)) / moved if moved else 0.0,
            outside=int(outside.sum()),
            size=recorded.size,
            example=_example(outside, computed, original, bound) if outside.any() else "",
        )


def _example(outside: Array, mine: Array, theirs: Array, bound: Interval) -> str:
    at = tuple(int(i) for i in np.argwhere(outside)[0])
    low, high = (np.broadcast_to(end, mine.shape)[at] for end in (bound.low, bound.high))
    return f"{list(at)}: recorded {theirs[at]:.9g}, got {mine[at]:.9g}, bound [{low:.9g}, {high:.9g}]"


def worst(rows: Iterable[Row]) -> Row | None:
    """Returns the row that speaks most against equivalence: elements outside, then the ratio to the bound."""
    return max(rows, key=lambda row: (row.outside > 0, row.ratio, row.ulps), default=None)
