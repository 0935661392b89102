"""The algebra: what becomes of a parameter, and of all that an optimizer keeps of it, when its axes change.

Every slot has kept some of its parameter's axes: a full one all of them, `v_row` and `v_col` those that their rule
left. So an operation says two things: what becomes of the labels of the axes, and what becomes of a tensor that has
kept some of them. Nothing is read; all are views. docs/transforms.md derives it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from statekit.errors import InexactError, StateError
from statekit.state.exactness import Exactness
from statekit.state.schema import NATIVE_SHAPE, OverTensor, load_schema
from statekit.state.train_state import Axis, Rule
from statekit.tensors import views
from statekit.tensors.places import By, Combined
from statekit.tensors.tensor import Tensor

SAY_RULES = "give the run's factor rules: logical_factor_rules with logical_axes, or factor_map (--hparams)"


@dataclass(frozen=True)
class Piece:
    """A parameter with its slots, on its way through a map.

    Attributes:
        schema: Name of the schema that its slots are of.
        param: The parameter.
        slots: Its slots, by canonical name.
        rule: How it is factored; None where unknown, or the optimizer doesn't factor.
        exactness: How exactly training goes on so far. The values are kept to the bit in any case.
        reason: Why it isn't bitwise; empty if it is.
        over: What its update computes over the whole of it; as its schema's reference has it, if None.
        scale: What its values were multiplied by so far, which its hyperparameters follow.
    """

    schema: str
    param: Tensor
    slots: Mapping[str, Tensor]
    rule: Rule | None = None
    exactness: Exactness = Exactness.BITWISE
    reason: str = ""
    over: tuple[OverTensor, ...] | None = None
    scale: float = 1.0

    def kept(self, slot: str) -> tuple[int, ...] | None:
        """Returns the parameter's axes that a slot has kept; None for one that doesn't go by them.

        Raises:
            InexactError: No schema describes the slot, and it hasn't the parameter's shape.
        """
        kind = load_schema(self.schema).slots[slot].shape
        has_its_shape = self.slots[slot].shape == self.param.shape
        if kind == NATIVE_SHAPE and not has_its_shape:
            raise InexactError(
                f"has the slot {slot} of shape {self.slots[slot].shape}, and no schema says what becomes of that"
            )
        if kind in ("parameter", NATIVE_SHAPE):
            return tuple(range(len(self.param.shape)))
        if kind in ("row", "column") and self.rule is not None:
            return self.rule.kept(slot)
        return None

    def labelled(self, exactness: Exactness, *reasons: str) -> Piece:
        """Returns it no more exact than that, with further reasons."""
        before = self.reason.split("; ") if self.reason else []
        reason = "; ".join(dict.fromkeys([*before, *reasons]))
        return replace(self, exactness=max(self.exactness, exactness), reason=reason)

    def is_batch(self, axis: int) -> bool:
        """Tells whether an axis is a BATCH one of its rule."""
        return self.rule is not None and self.rule.axes[axis] is Axis.BATCH

    def shared(self) -> Piece:
        """Returns it labelled for numbers of it that can't be told apart for its parts."""
        numbers = [name for name in self.slots if self.kept(name) is None]
        if not numbers:
            return self
        reason = f"{', '.join(numbers)}: of each part as if the parts were alike"
        return self.labelled(Exactness.ESTIMATE, reason)

    def regrouped(self, along_batch: bool, before: str, after: str) -> Piece:
        """Returns it labelled for what its update computes over a whole tensor, once that is another.

        Args:
            along_batch: Whether it is along a BATCH axis of the rule, where some of that goes by itself at each place.
            before: What that was computed over.
            after: What it will be.
        """
        over = self.over
        if over is None:
            schema = load_schema(self.schema)
            reference = schema.data["reference"]
            over = schema.over_tensor(reference, schema.settings(reference))
        over = tuple(change for change in over if not (along_batch and change.but_for_batch))
        if not self.slots or not over:
            return self
        entered = [
            f"{change.what}, in {slot}" for change in over for slot in change.enters if slot in self.slots
        ]
        reason = (
            f"{', '.join(change.what for change in over)}: so far over {before}, from now on over {after}"
        )
        if entered:
            return self.labelled(Exactness.ESTIMATE, reason, f"what was over {before}: {', '.join(entered)}")
        return self.labelled(Exactness.STATISTICS, reason)


def check_kept(piece: Piece, reason: object) -> None:
    """Refuses what goes by the axes that factored slots have kept, where equal lengths leave them open.

    A matrix passes, as it does in a step: its size settles which axis is which, unless a factor map said otherwise.

    Raises:
        InexactError: The rule is assumed, and a slot may have kept others of the parameter's axes.
    """
    rule, shape = piece.rule, piece.param.shape
    if rule is None or rule.known_from != "assumed" or not rule.factored or len(shape) < 3:
        return
    for name in ("v_row", "v_col"):
        if name not in piece.slots:
            continue
        ways = combinations(range(len(shape)), len(piece.slots[name].shape))
        if sum(tuple(shape[i] for i in way) == piece.slots[name].shape for way in ways) > 1:
            raise InexactError(
                f"becomes {reason}, and its axes of one length leave open which of them {name} has kept; {SAY_RULES}"
            )


class Operation(ABC):
    """What turns parameters with their slots into others."""

    @abstractmethod
    def of(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """Returns what the pieces become.

        Raises:
            StateError: They haven't the axes for it.
            InexactError: What they hold doesn't tell what the result would hold.
        """

    @abstractmethod
    def __str__(self) -> str:
        """Says it in a few words, for a plan."""


class OfEach(Operation):
    """An operation on each piece by itself."""

    def of(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        return tuple(map(self._of, pieces))

    def _of(self, piece: Piece) -> Piece:
        self._check(piece)
        rank = len(piece.param.shape)
        slots = {}
        for name, slot in piece.slots.items():
            kept = piece.kept(name)
            slots[name] = self._number(piece, name) if kept is None else self._view(slot, kept)
        rule = piece.rule and Rule(self._labels(piece.rule.axes), piece.rule.known_from)
        piece = self._labelled(piece)
        return replace(piece, param=self._view(piece.param, tuple(range(rank))), slots=slots, rule=rule)

    def _number(self, piece: Piece, name: str) -> Tensor:
        """Returns what becomes of a slot that is one number for the parameter, or a history of such."""
        return piece.slots[name]

    def _labelled(self, piece: Piece) -> Piece:
        """Returns a piece that is about to change, with how exactly training goes on."""
        return piece

    @abstractmethod
    def _check(self, piece: Piece) -> None:
        """Refuses a piece that this can't be done with."""

    def _labels(self, labels: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Returns what becomes of the label of each axis."""
        return labels

    def _view(self, tensor: Tensor, kept: tuple[int, ...]) -> Tensor:
        """Returns what becomes of a tensor that has kept some of the parameter's axes."""
        return tensor


@dataclass(frozen=True)
class Permute(OfEach):
    """Axes in another order: bitwise for every slot, whose averaged axes move along.

    Attributes:
        order: The new axis i is the axis `order[i]`.
    """

    order: tuple[int, ...]

    def _check(self, piece: Piece) -> None:
        if sorted(self.order) != list(range(len(piece.param.shape))):
            raise StateError(f"has shape {piece.param.shape}, but shall be {self}")
        check_kept(piece, self)

    def _labels(self, labels: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(labels[i] for i in self.order)

    def _view(self, tensor: Tensor, kept: tuple[int, ...]) -> Tensor:
        order = tuple(kept.index(i) for i in self.order if i in kept)
        return tensor if order == tuple(range(len(order))) else views.Permuted(tensor, order)

    def __str__(self) -> str:
        return "transposed" if self.order == (1, 0) else f"axes {list(self.order)}"


@dataclass(frozen=True)
class Merge(OfEach):
    """Merges two neighbouring axes; bitwise if the rule treats both alike.

    Attributes:
        axis: The first of the two.
        outer: Its length, where somebody said it.
    """

    axis: int
    outer: int | None = None

    def _check(self, piece: Piece) -> None:
        shape, rule = piece.param.shape, piece.rule
        if len(shape) < self.axis + 2:
            raise StateError(f"has shape {shape}, but shall have {self}")
        if self.outer not in (None, shape[self.axis]):
            raise StateError(
                f"has length {shape[self.axis]} along axis {self.axis}, not {self.outer} as was said"
            )
        check_kept(piece, self)
        if rule is not None and rule.axes[self.axis] is not rule.axes[self.axis + 1]:
            first, second = (axis.value for axis in rule.axes[self.axis : self.axis + 2])
            raise InexactError(f"has a {first} and a {second} axis, which can't be one")

    def _labels(self, labels: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return (*labels[: self.axis], *labels[self.axis + 1 :])

    def _number(self, piece: Piece, name: str) -> Tensor:
        return reranked(piece.slots[name], len(piece.param.shape) - 1)

    def _view(self, tensor: Tensor, kept: tuple[int, ...]) -> Tensor:
        return views.Merged(tensor, kept.index(self.axis)) if self.axis in kept else tensor

    def __str__(self) -> str:
        return f"axes {self.axis} and {self.axis + 1} merged"


@dataclass(frozen=True)
class Part(OfEach):
    """Splits one axis into two, which keep its label in the rule. It undoes `Merge`.

    Attributes:
        axis: The axis.
        outer: The length of the first of the two.
    """

    axis: int
    outer: int

    def _check(self, piece: Piece) -> None:
        shape = piece.param.shape
        if len(shape) <= self.axis or self.outer < 1 or shape[self.axis] % self.outer:
            raise StateError(f"has shape {shape}, but shall have {self}")
        check_kept(piece, self)

    def _labels(self, labels: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return (*labels[: self.axis + 1], *labels[self.axis :])

    def _number(self, piece: Piece, name: str) -> Tensor:
        return reranked(piece.slots[name], len(piece.param.shape) + 1)

    def _view(self, tensor: Tensor, kept: tuple[int, ...]) -> Tensor:
        return views.Parted(tensor, kept.index(self.axis), self.outer) if self.axis in kept else tensor

    def __str__(self) -> str:
        return f"axis {self.axis} parted into {self.outer}"


@dataclass(frozen=True)
class Unstack(OfEach):
    """One of the tensors that were stacked along an axis.

    Bitwise along a BATCH axis where the update treats it so that every tensor goes on by itself, as that of T5X does.
    Else each value is kept, but what the update computes over the whole parameter was computed over the stack:
    statistics. What was averaged away along the axis can't be told apart.
    """

    axis: int
    place: int

    def _check(self, piece: Piece) -> None:
        if len(piece.param.shape) <= self.axis:
            raise StateError(f"has shape {piece.param.shape}, and no axis {self.axis} to be unstacked")
        if not piece.slots or piece.rule is None:
            return
        label = piece.rule.axes[self.axis]
        if piece.rule.known_from == "assumed":
            raise InexactError(
                f"is unstacked along axis {self.axis}, and nothing tells whether that is a BATCH axis; {SAY_RULES}"
            )
        if label in (Axis.ROW, Axis.COLUMN):
            slot = "v_col" if label is Axis.ROW else "v_row"
            raise InexactError(
                f"is unstacked along its {label.value} axis {self.axis}, which {slot} has averaged away"
            )

    def _labelled(self, piece: Piece) -> Piece:
        return piece.shared().regrouped(piece.is_batch(self.axis), "the stack", "each by itself")

    def _number(self, piece: Piece, name: str) -> Tensor:
        share = 1 / max(1, piece.param.shape[self.axis])
        return reranked(share_of(piece, name, share), len(piece.param.shape) - 1)

    def _labels(self, labels: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return (*labels[: self.axis], *labels[self.axis + 1 :])

    def _view(self, tensor: Tensor, kept: tuple[int, ...]) -> Tensor:
        return views.Slice(tensor, kept.index(self.axis), self.place) if self.axis in kept else tensor

    def __str__(self) -> str:
        return f"number {self.place} of axis {self.axis}"


@dataclass(frozen=True)
class Stack(Operation):
    """Stacks tensors of one shape along a new axis, which is BATCH in the rule. It undoes `Unstack`, as exactly.

    Attributes:
        axis: The new axis.
        count: How many make a stack; all, if None.
    """

    axis: int
    count: int | None = None

    def of(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        count = self.count or len(pieces)
        return tuple(self._stacked(pieces[i : i + count]) for i in range(0, len(pieces), count))

    def _stacked(self, pieces: Sequence[Piece]) -> Piece:
        first = pieces[0]
        for piece in pieces:
            if _form(piece) != _form(first):
                raise StateError(f"is stacked of unlike parts: {_form(first)} and {_form(piece)}")
        rank = len(first.param.shape)
        if rank < self.axis:
            raise StateError(f"has shape {first.param.shape}, and can't be stacked along axis {self.axis}")
        slots = {}
        worst = max(pieces, key=lambda piece: piece.exactness)
        worst = worst.regrouped(first.rule is not None, "each by itself", "the stack")
        for name in first.slots:
            if (kept := first.kept(name)) is None:
                number = fused_number(pieces, name)
                slots[name], worst = reranked(number, rank + 1), worst.labelled(*number_said(first, name))
                continue
            slots[name] = self._view([piece.slots[name] for piece in pieces], kept)
        rule = first.rule
        if rule is not None:
            rule = replace(rule, axes=(*rule.axes[: self.axis], Axis.BATCH, *rule.axes[self.axis :]))
        param = self._view([piece.param for piece in pieces], tuple(range(rank)))
        return replace(worst, param=param, slots=slots, rule=rule)

    def _view(self, tensors: Sequence[Tensor], kept: tuple[int, ...]) -> Tensor:
        return views.Stack(tuple(tensors), sum(i < self.axis for i in kept))

    def __str__(self) -> str:
        return f"stacked along axis {self.axis}"


_SUMS = ("sum", "sum_if_uncorrelated")


def fused_number(pieces: Sequence[Piece], name: str) -> Tensor:
    """Fuses a slot with one number for each of several parameters into one number for all."""
    rule = load_schema(pieces[0].schema).slots[name].fused
    weights = tuple(math.prod(piece.param.shape) for piece in pieces)
    by: By = "root_mean_square" if rule == "root_mean_square" else "sum"
    return Combined(tuple(piece.slots[name] for piece in pieces), weights, by)


def number_said(piece: Piece, name: str) -> tuple[Exactness, str]:
    """Returns how exact `fused_number` is, and why."""
    match load_schema(piece.schema).slots[name].fused:
        case "root_mean_square":
            return Exactness.STATISTICS, f"{name}: the root mean square of the parts', by their elements"
        case "sum":
            return Exactness.STATISTICS, f"{name}: the sum of the parts'"
    return Exactness.ESTIMATE, f"{name}: the sum of the parts', as if these weren't correlated"


def share_of(piece: Piece, name: str, share: float) -> Tensor:
    """Returns a part's slot, from a slot of one number and the part's share of elements."""
    slot = piece.slots[name]
    return views.Scaled(slot, share) if load_schema(piece.schema).slots[name].fused in _SUMS else slot


def reranked(number: Tensor, rank: int) -> Tensor:
    """Reshapes a slot of one number, or of a history of numbers, for a parameter of another rank."""
    history = number.shape[:1] if number.shape and number.shape[0] != 1 else ()
    shape = (*history, *(1,) * rank)
    return number if number.shape == shape else views.Squeezed(number, shape)


def _form(piece: Piece) -> str:
    """Says what must be alike in tensors that are stacked."""
    rule = ", ".join(axis.value for axis in piece.rule.axes) if piece.rule else "no rule"
    slots = ", ".join(f"{name} {slot.dtype} {slot.shape}" for name, slot in sorted(piece.slots.items()))
    scale = f", times {piece.scale:g}" if piece.scale != 1 else ""
    return f"{piece.param.dtype} {piece.param.shape}, {rule}, {slots or 'no slots'}{scale}"
