"""The operations that make values up or leave some out: copies, other lengths, other dtypes, other factors.

None is exact for slots; each goes by a rule that the map states, and says so. docs/transforms.md derives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from statekit.errors import StateError
from statekit.maps.along_axis import averaged_over, means, rescaled
from statekit.maps.operations import OfEach, Operation, Piece, Unstack, check_kept, reranked, share_of
from statekit.state.exactness import Exactness
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, Rule
from statekit.tensors.places import Padded, Picked, Reconstructed, Repeated
from statekit.tensors.tensor import DTYPES, Tensor, widens
from statekit.tensors.views import Mean, Scaled, cast, mean_over

New: TypeAlias = Literal["zeros", "mean"]
"""What new places along an axis are: zeros, or the mean of those that there were."""
_OF_PARAM = ("master", "average")
"""Slots that are the parameter itself, more exactly or averaged, and so what becomes of it."""


@dataclass(frozen=True)
class Replicate(OfEach):
    """Copies of a parameter with its slots, as the experts of an upcycled model.

    Attributes:
        count: How many copies there are.
        axis: The new axis, a BATCH one of the rule, along which they stand; None where each is a parameter by itself.
    """

    count: int
    axis: int | None = None

    def _check(self, piece: Piece) -> None:
        if self.axis is not None and len(piece.param.shape) < self.axis:
            raise StateError(f"has shape {piece.param.shape}, and can't become {self}")
        if self.axis is not None:
            check_kept(piece, self)

    def _labelled(self, piece: Piece) -> Piece:
        if not piece.slots:
            return piece
        if self.axis is not None:
            piece = piece.regrouped(piece.rule is not None, "each by itself", "the copies together")
        return piece.labelled(
            Exactness.ESTIMATE, "each copy has the slots of the one, and gradients of its own"
        )

    def _labels(self, labels: tuple[Axis, ...]) -> tuple[Axis, ...]:
        if self.axis is None:
            return labels
        return (*labels[: self.axis], Axis.BATCH, *labels[self.axis :])

    def _number(self, piece: Piece, name: str) -> Tensor:
        if self.axis is None:
            return piece.slots[name]
        alike = share_of(piece, name, self.count)
        return reranked(alike, len(piece.param.shape) + 1)

    def _view(self, tensor: Tensor, kept: tuple[int, ...]) -> Tensor:
        at = self.axis
        return tensor if at is None else Repeated(tensor, sum(i < at for i in kept), self.count)

    def __str__(self) -> str:
        if self.axis is None:
            return f"one of {self.count} copies"
        return f"{self.count} copies along axis {self.axis}"


@dataclass(frozen=True)
class KeepFirst(Operation):
    """The first of some copies, the others left out; undoes `Replicate`, where copies are still alike.

    Attributes:
        count: How many copies there are.
        axis: The axis along which they stand, which goes; None where each is a parameter by itself.
    """

    count: int
    axis: int | None = None

    def of(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        step = 1 if self.axis is not None else self.count
        return tuple(map(self._first, pieces[::step]))

    def _first(self, piece: Piece) -> Piece:
        reason = f"of {self.count} copies the first is kept, whatever the others have become"
        piece = piece.labelled(Exactness.LOSSY, reason)
        at, shape = self.axis, piece.param.shape
        if at is None:
            return piece
        if len(shape) <= at or shape[at] != self.count:
            raise StateError(f"has shape {shape}, and not {self.count} copies along axis {at}")
        (first,) = Unstack(at, 0).of([piece])
        return first

    def __str__(self) -> str:
        where = "" if self.axis is None else f" along axis {self.axis}"
        return f"the first of {self.count} copies{where}"


@dataclass(frozen=True)
class Resize(OfEach):
    """More or fewer places along an axis, as of a vocabulary: new ones by a rule, those beyond the end left out.

    Attributes:
        axis: The axis.
        before: Its length.
        after: Its length then.
        param: What new places of the parameter are, and of slots that are the parameter itself.
        slots: What those of its other slots are.
    """

    axis: int
    before: int
    after: int
    param: New
    slots: New

    def _of(self, piece: Piece) -> Piece:
        after = super()._of(piece)
        slots = dict(after.slots)
        for name in piece.slots:
            kept = piece.kept(name)
            if kept is not None and self.axis in kept:
                slots[name] = self._along(
                    piece.slots[name], kept, self.param if name in _OF_PARAM else self.slots
                )
        after = replace(after, slots=slots)
        if (averaged := averaged_over(piece, self.axis)) is None:
            return after
        if self.after < self.before:
            slots[averaged] = rescaled(piece, after, averaged)
        elif self.slots == "zeros":  # as many more of them in the mean
            slots[averaged] = Scaled(piece.slots[averaged], self.before / self.after)
        return replace(after, slots=slots)

    def _along(self, tensor: Tensor, kept: tuple[int, ...], new: New) -> Tensor:
        at = kept.index(self.axis)
        if self.after <= self.before:
            return Picked(tensor, at, 0, self.after, self.before)
        return Padded(tensor, at, self.after, Mean(tensor, at) if new == "mean" else None)

    def _check(self, piece: Piece) -> None:
        shape = piece.param.shape
        if len(shape) <= self.axis or shape[self.axis] != self.before:
            raise StateError(f"has shape {shape}, but shall become {self}")
        check_kept(piece, self)

    def _labelled(self, piece: Piece) -> Piece:
        if self.after == self.before:
            return piece
        if self.after < self.before:
            reason = f"places {self.after} to {self.before - 1} of axis {self.axis} are left out"
            return piece.regrouped(piece.is_batch(self.axis), "all places", "those that stay").labelled(
                Exactness.LOSSY, reason
            )
        reason = (
            f"{self.after - self.before} new places along axis {self.axis}: {self.param} in the parameter"
        )
        reason += f", {self.slots} in slots" if piece.slots else ""
        return piece.regrouped(piece.is_batch(self.axis), "the old places", "all places").labelled(
            Exactness.ESTIMATE, reason
        )

    def _number(self, piece: Piece, name: str) -> Tensor:
        if self.after < self.before:
            return share_of(piece, name, self.after / self.before)
        is_size = load_schema(piece.schema).slots[name].fused == "root_mean_square"
        if is_size and self.param == "zeros":
            return Scaled(piece.slots[name], (self.before / self.after) ** 0.5)
        return piece.slots[name]

    def _view(self, tensor: Tensor, kept: tuple[int, ...]) -> Tensor:
        return self._along(tensor, kept, self.param) if self.axis in kept else tensor

    def __str__(self) -> str:
        return f"axis {self.axis} of length {self.after} instead of {self.before}"


@dataclass(frozen=True)
class Recast(OfEach):
    """A parameter in another dtype; its slots stay, but an average of it, which has its dtype."""

    before: str
    after: str

    def _of(self, piece: Piece) -> Piece:
        after = super()._of(piece)
        dtype = DTYPES[self.after]
        slots = {
            name: cast(slot, dtype) if load_schema(piece.schema).slots[name].dtype == "parameter" else slot
            for name, slot in piece.slots.items()
        }
        return replace(after, param=cast(piece.param, dtype), slots=slots)

    def _check(self, piece: Piece) -> None:
        if piece.param.dtype.name != self.before:
            raise StateError(f"is {piece.param.dtype.name}, and not {self.before}")

    def _labelled(self, piece: Piece) -> Piece:
        if widens(DTYPES[self.before], DTYPES[self.after]):
            reason = f"its updates are rounded to {self.after} from now on, so far to {self.before}"
            return piece.labelled(Exactness.ROUNDING, reason) if piece.slots else piece
        return piece.labelled(Exactness.LOSSY, f"rounded from {self.before} to {self.after}")

    def __str__(self) -> str:
        return f"{self.after} instead of {self.before}"


@dataclass(frozen=True)
class Factor(OfEach):
    """Averages a full second moment by a rule, into the factors that a factoring run would have kept."""

    axes: tuple[Axis, ...]

    def _of(self, piece: Piece) -> Piece:
        self._check(piece)
        piece, rule = self._labelled(piece), Rule(self.axes, "given")
        slots = {name: slot for name, slot in piece.slots.items() if name != "v"}
        if "v" in piece.slots:
            full = piece.slots["v"]
            slots = {
                "v_row": mean_over(full, rule.dims(Axis.COLUMN)),
                "v_col": mean_over(full, rule.dims(Axis.ROW)),
                **slots,
            }
        return replace(piece, slots=slots, rule=rule)

    def _check(self, piece: Piece) -> None:
        factors = "v_row" in load_schema(piece.schema).slots
        is_unfactored = piece.rule is not None and not piece.rule.factored
        if (piece.slots and not (factors and is_unfactored)) or len(self.axes) != len(piece.param.shape):
            raise StateError(f"has rank {len(piece.param.shape)}, and {_factors(piece)}; it shall be {self}")

    def _labelled(self, piece: Piece) -> Piece:
        if not piece.slots:
            return piece
        return piece.labelled(
            Exactness.STATISTICS, "v is averaged into v_row and v_col, as a factored run's would be"
        )

    def __str__(self) -> str:
        return f"factored by {', '.join(axis.value for axis in self.axes)}"


@dataclass(frozen=True)
class Unfactor(Factor):
    """A full second moment that factors stand for; undoes `Factor`, which has lost all but that.

    Attributes:
        axes: The labels of the rule that made the factors.
    """

    def _of(self, piece: Piece) -> Piece:
        self._check(piece)
        after = self._labelled(piece)
        slots = {name: slot for name, slot in piece.slots.items() if name not in ("v_row", "v_col")}
        if "v_row" in piece.slots:
            rule = Rule(self.axes, "given")
            row, column = piece.slots["v_row"], piece.slots["v_col"]
            axes = rule.kept("v_row"), rule.kept("v_col"), rule.dims(Axis.BATCH, Axis.NONE)
            full = Reconstructed(row, column, means(rule, "v_row", row), axes, piece.param.shape)
            slots = {"v": full, **slots}
        free = tuple(axis if axis is Axis.BATCH else Axis.NONE for axis in self.axes)
        return replace(after, slots=slots, rule=Rule(free, "given"))

    def _check(self, piece: Piece) -> None:
        if piece.slots and (piece.rule is None or piece.rule.axes != self.axes):
            raise StateError(f"{_factors(piece)}; it shall be {self}")

    def _labelled(self, piece: Piece) -> Piece:
        if not piece.slots:
            return piece
        return piece.labelled(Exactness.ESTIMATE, "v is the second moment that v_row and v_col stand for")

    def __str__(self) -> str:
        return f"no more {super().__str__()}"


def _factors(piece: Piece) -> str:
    if piece.rule is None:
        return "no rule says how it is factored"
    return f"is factored by {', '.join(axis.value for axis in piece.rule.axes)}"
