"""The operations along one axis: its places in another order, parts of it, several tensors along it.

What kept the axis follows place by place. What averaged it away doesn't notice an order; of fused parts it is the
weighted mean; of one part it can only be estimated. docs/transforms.md derives it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from statekit.errors import InexactError, StateError
from statekit.maps.operations import (
    SAY_RULES,
    OfEach,
    Operation,
    Piece,
    check_kept,
    fused_number,
    number_said,
    share_of,
)
from statekit.state.exactness import Exactness
from statekit.state.train_state import Axis, Rule
from statekit.tensors.places import Combined, Joined, Picked, Reordered, Rescaled
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.views import mean_over

REST = 0
"""Stands in a shape for what the other sizes leave, and in `turns` for as many as there are."""
_OTHER = {"v_row": "v_col", "v_col": "v_row"}


@dataclass(frozen=True)
class Reorder(OfEach):
    """The places of an axis in another order: bitwise for every slot, as means over the axis don't go by it.

    The axis is taken for several, as RoPE's (heads, 2, half), which are permuted and joined again.

    Attributes:
        axis: The axis.
        sizes: The lengths of those that it is taken for; at most one is `REST`.
        order: The new one i is the one `order[i]`.
    """

    axis: int
    sizes: Shape
    order: tuple[int, ...]

    def _check(self, piece: Piece) -> None:
        shape = piece.param.shape
        if len(shape) <= self.axis:
            raise StateError(f"has shape {shape}, but shall have {self}")
        self.made_up(shape[self.axis])
        check_kept(piece, self)

    def made_up(self, length: int) -> Shape:
        """Returns the sizes for an axis of some length.

        Raises:
            StateError: They don't make it up.
        """
        rest = length // math.prod(n for n in self.sizes if n != REST)
        sizes = tuple(rest if n == REST else n for n in self.sizes)
        if math.prod(sizes) != length:
            raise StateError(f"has length {length} along axis {self.axis}, but shall have {self}")
        return sizes

    def _view(self, tensor: Tensor, kept: tuple[int, ...]) -> Tensor:
        if self.axis not in kept:
            return tensor
        at = kept.index(self.axis)
        return Reordered(tensor, at, self.made_up(tensor.shape[at]), self.order)

    def __str__(self) -> str:
        sizes = ", ".join("rest" if n == REST else str(n) for n in self.sizes)
        return f"axis {self.axis} taken for ({sizes}) in order {list(self.order)}"


def runs(length: int, shares: Sequence[int], turns: int) -> tuple[int, ...] | None:
    """Returns how many places of an axis each part has in one turn; None if it can't be cut so.

    Args:
        length: The axis'.
        shares: How the parts' lengths are to each other.
        turns: How often the parts take turns; `REST`: as often as they can.

    Example:
        >>> runs(24, (4, 1, 1), 2), runs(24, (4, 1, 1), REST), runs(25, (1, 1), 1)
        ((8, 2, 2), (4, 1, 1), None)
    """
    total = sum(shares)
    turns = turns or length // (total // math.gcd(*shares))
    if turns < 1 or any(length * share % (turns * total) for share in shares):
        return None
    return tuple(length * share // (turns * total) for share in shares)


def averaged_over(piece: Piece, axis: int) -> str | None:
    """Returns the slot that has averaged an axis away, if any."""
    if piece.rule is None or "v_row" not in piece.slots:
        return None
    return {Axis.COLUMN: "v_row", Axis.ROW: "v_col"}.get(piece.rule.axes[axis])


def means(rule: Rule, name: str, slot: Tensor) -> Tensor:
    """Returns the means of `v_row` over ROW, or of `v_col` over COLUMN: of the second moment over both."""
    gone = rule.dims(Axis.ROW if name == "v_row" else Axis.COLUMN)
    return mean_over(slot, [i for i, axis in enumerate(rule.kept(name)) if axis in gone])


def rescaled(piece: Piece, part: Piece, name: str) -> Tensor:
    """Returns a slot that averaged an axis, for a part of which the other slot has been cut along it."""
    assert piece.rule is not None  # or no axis was averaged
    rule, other = piece.rule, _OTHER[name]
    along = means(rule, other, part.slots[other]), means(rule, other, piece.slots[other])
    shared = tuple(i for i, axis in enumerate(rule.kept(name)) if axis in rule.kept(other))
    return Rescaled(piece.slots[name], *along, shared)


@dataclass(frozen=True)
class Split(OfEach):
    """One of the parts that an axis is made of; undoes `Concatenate`.

    Slots that kept the axis are cut. One that averaged it is an average over all parts: it is rescaled so that the
    second moment that the slots stand for stays what it was, which is an estimate.

    Attributes:
        axis: The axis.
        shares: How the parts' lengths are to each other.
        place: Which part.
        turns: How often the parts take turns along the axis: 1 where they stand one after the other, `REST` where
            they are interleaved as finely as they can be.
    """

    axis: int
    shares: tuple[int, ...]
    place: int
    turns: int = 1

    def _of(self, piece: Piece) -> Piece:
        after = super()._of(piece)
        if (averaged := averaged_over(piece, self.axis)) is None:
            return after
        return replace(after, slots={**after.slots, averaged: rescaled(piece, after, averaged)})

    def _check(self, piece: Piece) -> None:
        shape, rule = piece.param.shape, piece.rule
        if len(shape) <= self.axis:
            raise StateError(f"has shape {shape}, but shall become {self}")
        self.runs(shape[self.axis])
        if piece.slots and rule is not None and rule.factored and len(shape) > 2:
            _check_known(rule, f"is split along axis {self.axis}")

    def _labelled(self, piece: Piece) -> Piece:
        piece = piece.shared().regrouped(piece.is_batch(self.axis), "the parts together", "each part")
        if (slot := averaged_over(piece, self.axis)) is None:
            return piece
        return piece.labelled(
            Exactness.ESTIMATE,
            f"{slot} has averaged axis {self.axis} over all parts, and is rescaled so that the second moment stays",
        )

    def _number(self, piece: Piece, name: str) -> Tensor:
        return share_of(piece, name, self.shares[self.place] / sum(self.shares))

    def _view(self, tensor: Tensor, kept: tuple[int, ...]) -> Tensor:
        if self.axis not in kept:
            return tensor
        at = kept.index(self.axis)
        of_parts = self.runs(tensor.shape[at])
        start = sum(of_parts[: self.place])
        return Picked(tensor, at, start, of_parts[self.place], sum(of_parts))

    def runs(self, length: int) -> tuple[int, ...]:
        """Returns how many places each part has in one turn of an axis.

        Raises:
            StateError: An axis of that length can't be split so.
        """
        of_parts = runs(length, self.shares, self.turns)
        if of_parts is None:
            raise StateError(f"has length {length} along axis {self.axis}, but shall become {self}")
        return of_parts

    def __str__(self) -> str:
        return f"part {self.place} of axis {self.axis}, {_ratio(self.shares, self.turns)}"


@dataclass(frozen=True)
class Concatenate(Operation):
    """Parts along an axis as one parameter; undoes `Split`.

    Slots that kept the axis are fused likewise, and of those that averaged it the mean is taken, each with the length
    of its part as its weight: what a run of the fused parameter would keep.

    Attributes:
        axis: The axis.
        count: How many parts make one.
        shares: How their lengths are to each other; None where it is unknown.
        turns: As in `Split`.
    """

    axis: int
    count: int
    shares: tuple[int, ...] | None = None
    turns: int = 1

    def of(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        return tuple(self._fused(pieces[i : i + self.count]) for i in range(0, len(pieces), self.count))

    def _fused(self, pieces: Sequence[Piece]) -> Piece:
        first = pieces[0]
        self._check(pieces)
        lengths = tuple(piece.param.shape[self.axis] for piece in pieces)
        of_parts = self.runs(lengths)
        worst = max(pieces, key=lambda piece: piece.exactness).regrouped(
            first.is_batch(self.axis), "each part", "the parts together"
        )
        slots: dict[str, Tensor] = {}
        for name in first.slots:
            if (kept := first.kept(name)) is None:
                slots[name] = fused_number(pieces, name)
                worst = worst.labelled(*number_said(first, name))
                continue
            parts = tuple(piece.slots[name] for piece in pieces)
            if self.axis in kept:
                slots[name] = Joined(parts, kept.index(self.axis), of_parts)
            else:
                slots[name] = Combined(parts, lengths)
                reason = f"{name} averages axis {self.axis}: the mean of the parts', by their lengths"
                worst = worst.labelled(Exactness.STATISTICS, reason)
        param = Joined(tuple(piece.param for piece in pieces), self.axis, of_parts)
        return replace(worst, param=param, slots=slots, rule=first.rule)

    def _check(self, pieces: Sequence[Piece]) -> None:
        first = pieces[0]
        if len(first.param.shape) <= self.axis:
            raise StateError(f"has shape {first.param.shape}, and shall be {self}")
        for piece in pieces:
            if self._form(piece) != self._form(first):
                raise StateError(f"is made of unlike parts: {self._form(first)} and {self._form(piece)}")
        if first.rule is not None and first.rule.factored and first.slots and len(first.param.shape) > 2:
            _check_known(first.rule, f"is fused along axis {self.axis}")

    def runs(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Returns how many places of each part stand together.

        Raises:
            StateError: Parts of these lengths can't be fused so.
        """
        of_parts = runs(sum(lengths), self.shares or lengths, self.turns) if all(lengths) else None
        turns = lengths[0] // of_parts[0] if of_parts else 0
        if of_parts is None or [run * turns for run in of_parts] != list(lengths):
            raise StateError(
                f"is made of parts of lengths {list(lengths)} along axis {self.axis}, and shall be {self}"
            )
        return of_parts

    def _form(self, piece: Piece) -> str:
        """Says what must be alike in parts."""
        shapes = {"": piece.param, **piece.slots}
        sizes = [
            f"{name} {tensor.dtype} {[n for i, n in zip(kept, tensor.shape, strict=True) if i != self.axis]}".strip()
            for name, tensor in sorted(shapes.items())
            if (kept := tuple(range(len(piece.param.shape))) if not name else piece.kept(name)) is not None
        ]
        rule = ", ".join(axis.value for axis in piece.rule.axes) if piece.rule else "no rule"
        scale = f", times {piece.scale:g}" if piece.scale != 1 else ""
        return f"{', '.join(sizes)}, {rule}{scale}"

    def __str__(self) -> str:
        ratio = "" if self.shares is None else f", {_ratio(self.shares, self.turns)}"
        return f"{self.count} parts fused along axis {self.axis}{ratio}"


def _ratio(shares: Sequence[int], turns: int) -> str:
    way = {REST: ", interleaved", 1: ""}.get(turns, f", in {turns} turns")
    return f"{' : '.join(map(str, shares))}{way}"


def _check_known(rule: Rule, subject: str) -> None:
    if rule.known_from == "assumed":
        raise InexactError(f"{subject}, and its factoring is not given; {SAY_RULES}")
