"""What the shapes of Adafactor's slots prove about how parameters are factored, and about how they were chosen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from statekit.converters.layouts.hyperparameters import Hyperparameters
from statekit.state.constants import variant_constants
from statekit.state.factoring import by_shape, by_size
from statekit.state.train_state import Axis, Rule
from statekit.tensors.tensor import Shape, Tensor

MINIMUM = "min_dim_size_to_factor"
_MAX_RANK = 8


def with_minimum(
    hyperparameters: Hyperparameters, factored: Sequence[int], unfactored: Sequence[int]
) -> tuple[Hyperparameters, list[str]]:
    """Returns hyperparameters whose min_dim_size_to_factor fits the slots, and what is open about it.

    Args:
        hyperparameters: Hyperparameters with the usual minimum.
        factored: The deciding size of each parameter that is factored.
        unfactored: That of each that could be and isn't.
    """
    low, high = max(unfactored, default=-1) + 1, min(factored, default=None)
    if low <= hyperparameters.values[MINIMUM] and (high is None or hyperparameters.values[MINIMUM] <= high):
        return hyperparameters, []
    if high is None:
        return hyperparameters.over({MINIMUM: low}, "assumed"), [
            f"{MINIMUM} is at least {low}; {low} is assumed."
        ]
    if low == high:
        return hyperparameters.over({MINIMUM: high}, "file"), []
    if low < high:
        return hyperparameters.over({MINIMUM: high}, "assumed"), [
            f"{MINIMUM} is from {low} to {high}; {high} is assumed."
        ]
    return hyperparameters, [
        f"{MINIMUM} is open: a parameter with a size of {high} is factored, one with {low - 1} isn't."
    ]


def fits(labels: tuple[Axis, ...], shape: Shape, row: Shape, column: Shape) -> bool:
    """Tells whether factored slots of these shapes follow from labels."""
    rule = Rule(labels, "file")
    return (
        rule.factored and rule.slot_shape("v_row", shape) == row and rule.slot_shape("v_col", shape) == column
    )


def from_slots(shape: Shape, row: Shape, column: Shape, by_logical_axes: bool) -> Rule | None:
    """Finds the rule of a factored parameter from the shapes of its slots; None if no rule gives them.

    A matrix with vectors for slots was factored by its size; nothing else does that. It counts as proven unless it is
    square. Otherwise every labelling that T5X takes is tried, and axes that both slots keep are taken for BATCH. That
    is proven only where labels come from logical axes, which allow no NONE beside ROW and COLUMN.
    """
    if len(shape) == 2 and fits(by_size(shape), shape, row, column):
        return Rule(by_size(shape), "assumed" if shape[0] == shape[1] else "file")
    if len(shape) > _MAX_RANK:
        return None
    labellings = itertools.product((Axis.ROW, Axis.COLUMN, Axis.BATCH), repeat=len(shape))
    taken = (labels for labels in labellings if len(shape) > 2 or Axis.BATCH in labels)
    fitting = [labels for labels in taken if fits(labels, shape, row, column)]
    if not fitting:
        return None
    proven = len(fitting) == 1 and (by_logical_axes or Axis.BATCH not in fitting[0])
    return Rule(fitting[0], "file" if proven else "assumed")


def shown_rule(shape: Shape, slots: Mapping[str, Tensor], variant: str | None) -> Rule | None:
    """Returns the rule of a parameter as its slots show it, or as the variant has it where that goes by shape alone."""
    constants = variant_constants("adafactor", variant) if variant else {"factored_rank": "two_or_rule"}
    by_rule = constants["factored_rank"] == "two_or_rule"
    if "v_row" not in slots:
        return Rule((Axis.NONE,) * len(shape), "file" if len(shape) < 2 or not by_rule else "assumed")
    row, column = slots["v_row"].shape, slots["v_col"].shape
    if not by_rule and len(shape) > 1 and fits(axes := by_shape(constants, shape, True), shape, row, column):
        open_tie = constants["tie_break"] == "argsort" and len(shape) > 3 and row == column
        return Rule(axes, "assumed" if open_tie else "file")
    for axes in ((Axis.ROW, Axis.COLUMN), (Axis.COLUMN, Axis.ROW)):
        if len(shape) == 2 and fits(axes, shape, row, column):
            return Rule(axes, "assumed" if shape[0] == shape[1] else "file")
    return from_slots(shape, row, column, False)
