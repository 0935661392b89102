"""Slices of partitioned variables: in which order they are parts, and the variable that they make up.

A partitioner of TensorFlow 1 makes a variable of several along one axis, which its Saver keeps under one name, each
slice under its place: `10 6 0,4:-`.
Source: tensorflow/tensorflow, python/ops/partitioned_variables.py; python/training/saver.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from statekit.errors import StateError, UsageError
from statekit.tensors.boxes import Cut, Joined
from statekit.tensors.slices import bounds, parse_spec
from statekit.tensors.tensor import Index, Shape, Tensor


def numbers(specs: Iterable[str]) -> dict[str, int]:
    """Returns the number of each part, which is its place along the axis that is partitioned.

    Example:
        >>> numbers(["10 6 4,6:-", "10 6 0,4:-"])
        {'10 6 0,4:-': 0, '10 6 4,6:-': 1}
    """
    return {spec: i for i, spec in enumerate(sorted(specs, key=_begin))}


def joined(name: str, slices: Mapping[str, Tensor], place: object) -> Tensor:
    """Returns the variable that slices make up.

    Raises:
        StateError: They don't make up one, as TensorFlow saves slots of partitioned variables below a scope.
    """
    shapes = {_box(spec)[0] for spec in slices}
    try:
        if len(shapes) == 1:
            return Joined({_begin(spec): slices[spec] for spec in numbers(slices)}, shapes.pop())
        fault: object = f"parts of {len(shapes)} shapes"
    except UsageError as error:
        fault = error.found
    raise StateError(
        "The slices of a variable don't make it up.",
        place=f"{name} in {place}",
        expected="slices that tile it",
        found=fault,
    )


def cut(tensor: Tensor, specs: Iterable[str]) -> dict[str, Tensor] | None:
    """Returns a variable's slices by their places; None if they are another shape's."""
    boxes = {spec: _box(spec) for spec in specs}
    if {shape for shape, _ in boxes.values()} != {tensor.shape}:
        return None
    return {spec: Cut(tensor, box) for spec, (_, box) in boxes.items()}


def _box(spec: str) -> tuple[Shape, Index]:
    named = parse_spec(spec)
    if named is None:
        raise StateError("A slice has no place in its variable.", expected="such as 10 6 0,4:-", found=spec)
    shape, extent = named
    return shape, bounds(extent, shape)


def _begin(spec: str) -> tuple[int, ...]:
    return tuple(part.start for part in _box(spec)[1])
