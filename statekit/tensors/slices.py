"""Where a slice of a partitioned variable lies in it, and the text that stands for it in TensorFlow's checkpoints.

`10 6 0,4:-` is the full shape, then start and length along each axis, or `-` for the whole of one.
Source: tensorflow/tensorflow, core/framework/variable.proto, `SaveSliceInfoDef`; python/ops/variables.py,
`SaveSliceInfo.spec`.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from statekit.tensors.tensor import Index, Shape

Extent: TypeAlias = tuple[tuple[int, int], ...]
"""Start and length of a slice along each axis; length `FULL` if it isn't said, for the whole axis."""
FULL = -1
_SPEC = re.compile(r"((?:\d{1,18} )*)((?:-|\d{1,18},\d{1,18})(?::(?:-|\d{1,18},\d{1,18}))*)")


def bounds(extent: Extent, shape: Shape) -> Index:
    """Returns where a slice lies in its tensor."""
    return tuple(
        slice(0, size) if length == FULL else slice(start, start + length)
        for (start, length), size in zip(extent, shape, strict=True)
    )


def parse_spec(text: str) -> tuple[Shape, Extent] | None:
    """Returns the full shape and the place of a slice that TensorFlow's Saver names; None of another text.

    Example:
        >>> parse_spec("10 6 0,4:-")
        ((10, 6), ((0, 4), (0, -1)))
    """
    match = _SPEC.fullmatch(text)
    full = tuple(map(int, match[1].split())) if match else ()
    pieces = match[2].split(":") if match else []
    if match is None or len(pieces) != len(full):
        return None
    numbers = (piece.split(",") for piece in pieces)
    return full, tuple(
        (0, FULL) if number == ["-"] else (int(number[0]), int(number[1])) for number in numbers
    )
