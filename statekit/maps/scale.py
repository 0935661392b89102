"""Values times a number: what becomes of a parameter's slots, and of the hyperparameters that move it.

A parameter times c has a gradient divided by c. Its update stays c times the old one only if rate, epsilon and weight
decay follow, in a group of their own. Which power of c each gets stands in the schema. docs/transforms.md derives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from statekit.errors import InexactError, StateError
from statekit.maps.operations import OfEach, Piece
from statekit.state.evidence import SCALED, scaled
from statekit.state.exactness import Exactness
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.state.train_state import Group, Kind
from statekit.tensors.tensor import Shape
from statekit.tensors.views import Scaled

_ROUNDED = 1e-12
"""Relative difference of numbers that are equal but for the rounding of a factor and of its inverse."""

_LARGEST = 2.0**100
"""The largest number that a parameter is multiplied or divided by: its powers are numbers too."""


@dataclass(frozen=True)
class Scale(OfEach):
    """A parameter times a number c: moments by their powers of 1/c; bitwise where c is a power of two.

    Attributes:
        factor: The number.
        root_of_axis: The axis the root of whose length it is multiplied by; None for none.
        divides: Whether it divides instead.
    """

    factor: float = 1.0
    root_of_axis: int | None = None
    divides: bool = False

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Scale:
        """Returns an operation as a map's file has it."""
        factor = data.get("factor", 1.0)
        return cls(
            factor if abs(factor) <= _LARGEST else math.inf,
            data.get("root_of_axis"),
            data.get("divides", False),
        )

    def number(self, shape: Shape) -> float:
        """Returns c for a parameter of some shape.

        Raises:
            StateError: The shape has no such axis, or it makes no number that values can be multiplied by and back.
        """
        if self.root_of_axis is not None and len(shape) <= self.root_of_axis:
            raise StateError(f"has shape {shape}, but shall be {self}")
        length = 1 if self.root_of_axis is None else shape[self.root_of_axis]
        is_near = 1 / _LARGEST <= self.factor <= _LARGEST
        number = self.factor * math.sqrt(length) if is_near else 0.0
        if not number:
            raise StateError(f"has shape {shape}, and is to be {self}, by which nothing can be divided again")
        return 1 / number if self.divides else number

    def _of(self, piece: Piece) -> Piece:
        number = self.number(piece.param.shape)
        powers = load_schema(piece.schema).data.get("rescaled", {}).get("slots", {})
        if unknown := [name for name in piece.slots if name not in powers]:
            raise InexactError(
                f"is {self}, and no rule says how {', '.join(unknown)} of {piece.schema} follows"
            )
        slots = {name: Scaled(slot, number ** powers[name]) for name, slot in piece.slots.items()}
        if math.frexp(number)[0] != 0.5:  # no power of two
            piece = piece.labelled(Exactness.ROUNDING, f"values are {self}, {number:.6g}, and rounded")
        return replace(piece, param=Scaled(piece.param, number), slots=slots, scale=piece.scale * number)

    def _check(self, piece: Piece) -> None:
        self.number(piece.param.shape)

    def __str__(self) -> str:
        root = "" if self.root_of_axis is None else f"the root of axis {self.root_of_axis}"
        number = " times ".join([f"{self.factor:g}"] * (not root or self.factor != 1) + [root] * bool(root))
        return f"{'divided by' if self.divides else 'times'} {number}"


def followed(group: Group, kind: Kind, scales: Mapping[str, float]) -> Iterator[Group]:
    """Yields a group, and behind it one for each number by which some of its parameters were multiplied.

    Args:
        group: The group, with the paths that its parameters have now.
        kind: Its schema and variant.
        scales: The number of each path.
    """
    parts: dict[float, list[str]] = {}
    for path in group.paths:
        parts.setdefault(scales.get(path, 1.0), []).append(path)
    for number, paths in sorted(parts.items(), key=lambda part: part[0] != 1):
        part = group.only(paths)
        yield part if number == 1 else _followed(part, kind, number)


def _followed(group: Group, kind: Kind, number: float) -> Group:
    """Returns a group whose hyperparameters move parameters times a number as they moved the parameters."""
    values = load_schema(kind[0]).rescaled(kind[1], group.hyperparameters, number)
    others = tuple(fact for fact in group.facts if fact.name != SCALED)
    whole = group.scale * number
    if math.isclose(whole, 1, rel_tol=_ROUNDED):
        return replace(group, hyperparameters=values, facts=others)
    return replace(group, hyperparameters=values, facts=(*others, *scaled(group.paths, whole)))


def unfollowed(group: Group, kind: Kind) -> list[str]:
    """Returns the hyperparameters of a group by whose values a scaled parameter goes on in another way."""
    schema = load_schema(kind[0])
    settings = _settings(schema, kind[1], group.hyperparameters)
    needed = schema.data.get("rescaled", {}).get("only_where", {})
    return [name for name, values in needed.items() if settings.get(name) not in values]


def _settings(schema: OptimizerSchema, variant: str | None, values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**({} if variant is None else schema.settings(variant)), **values}


def joined(groups: Sequence[Group], order: Sequence[str]) -> list[Group]:
    """Returns groups of which those that are moved alike are one, their paths in some order."""
    places = {path: i for i, path in enumerate(order)}
    joined_groups: list[Group] = []
    for group in groups:
        alike = next((i for i, other in enumerate(joined_groups) if _alike(group, other)), None)
        if alike is None:
            joined_groups.append(group)
        else:
            paths = sorted((*joined_groups[alike].paths, *group.paths), key=lambda path: places[path])
            joined_groups[alike] = replace(joined_groups[alike], paths=tuple(paths))
    return joined_groups


def _alike(group: Group, other: Group) -> bool:
    """Tells whether two groups differ in their parameters alone, and in the last bit of what was scaled back."""
    pairs = [(group.hyperparameters.get(name), value) for name, value in other.hyperparameters.items()]
    if group.slots or len(pairs) != len(group.hyperparameters) or not all(_same(*pair) for pair in pairs):
        return False
    bare, other_bare = (
        # What a file said before the user said something else moves nothing.
        replace(member, paths=(), facts=tuple(fact for fact in member.facts if not fact.is_against_file))
        for member in (group, replace(other, hyperparameters=group.hyperparameters))
    )
    return bare == other_bare


def _same(value: Any, other: Any) -> bool:
    """Tells whether two values of a hyperparameter are one, but for rounding."""
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=_ROUNDED)
    return bool(value == other)


def _some(paths: Sequence[str]) -> str:
    first, *others = paths
    return f"{first} and {len(others)} more" if others else first


def sentence(group: Group, number: float) -> str:
    """Says what a group's scaled parameters need, whoever moves them."""
    return (
        f"{_some(group.paths)}: {number:.6g} times what the source has, so a group of its own moves it, with "
        f"{number:.6g} times the learning rate at every update and weight decay and epsilon divided by {number:.6g}. "
        f"Clipping by a global norm must take its gradients times {number:.6g}."
    )
