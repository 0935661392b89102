"""Whether boxes cover a tensor exactly: none reaches beyond it, none overlaps another, nothing is left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from statekit.errors import RefusedError
from statekit.tensors.tensor import Shape

Box: TypeAlias = tuple[Shape, Shape]
"""First index and size along each axis."""

MAX_COMPARED = 20_000_000
"""Pairs of boxes that are compared at most; a regular grid of n boxes takes at most n times the root of n."""


def tiling_fault(shape: Shape, boxes: Sequence[Box]) -> str:
    """Returns what is wrong with the boxes of a tensor; "" if they tile it.

    Raises:
        RefusedError: There are so many, so oddly placed, that comparing them takes too long.

    Example:
        >>> tiling_fault((4, 2), [((0, 0), (3, 2)), ((3, 0), (1, 2))])
        ''
        >>> tiling_fault((4, 2), [((0, 0), (3, 2))])
        'has 6 of 8 values'
    """
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"has a part of {len(sizes)} axes, expected {len(shape)}"
        if any(start + n > whole for start, n, whole in zip(offsets, sizes, shape, strict=True)):
            return f"has a part at {offsets} of size {sizes} that reaches beyond {shape}"
    filled = [box for box in boxes if math.prod(box[1])]
    clash = next(_overlaps(shape, filled), None)
    if clash:
        return f"has parts at {clash[0][0]} and {clash[1][0]} that overlap"
    held, size = sum(math.prod(sizes) for _, sizes in filled), math.prod(shape)
    return "" if held == size else f"has {held} of {size} values"


def _overlaps(shape: Shape, boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Yields overlapping pairs, sweeping along the axis that is cut most often."""
    if len(boxes) < 2:
        return
    if not shape:
        yield boxes[0], boxes[1]
        return
    axis = max(range(len(shape)), key=lambda i: len({offsets[i] for offsets, _ in boxes}))
    reached: list[Box] = []
    compared = 0
    for box in sorted(boxes, key=lambda one: one[0][axis]):
        start = box[0][axis]
        reached = [other for other in reached if other[0][axis] + other[1][axis] > start]
        compared += len(reached)
        if compared > MAX_COMPARED:
            raise RefusedError(
                "A tensor is cut into too many parts.",
                expected=f"at most {MAX_COMPARED} comparisons to see that none overlap",
                found=f"{len(boxes)} parts",
            )
        yield from ((other, box) for other in reached if _meet(other, box))
        reached.append(box)


def _meet(left: Box, right: Box) -> bool:
    return all(
        a < b + m and b < a + n for a, n, b, m in zip(left[0], left[1], right[0], right[1], strict=True)
    )
