"""How Optax' Adafactor factors a parameter, as its slots show.

The two largest axes are averaged away, the largest in `v_row`. Which axes of equal size are taken follows numpy's
argsort, which isn't stable: up to rank 3 it is the later one, beyond that it depends on numpy's version and on the
machine that ran.
Source: google-deepmind/optax optax/_src/factorized.py, `_factored_dims`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from statekit.state.constants import variant_constants
from statekit.state.factoring import PLACEHOLDER, by_shape
from statekit.state.train_state import Axis, Rule
from statekit.tensors.tensor import Shape, Tensor

_SETTLED_RANK = 3
"""Up to this rank the order of equal axes is the same in every numpy."""


@dataclass(frozen=True)
class Factoring:
    """What the slots of one parameter show.

    Attributes:
        shape: The parameter's.
        factored: Whether `v_row` and `v_col` are in use, and not `v`.
        decides: The size that is compared with min_dim_size_to_factor; 0 where the rank is below 2.
    """

    shape: Shape
    factored: bool
    decides: int


def factoring(shape: Shape, slots: Mapping[str, Tensor]) -> Factoring | str:
    """Returns what three slots show, or in a few words what is wrong with them."""
    row, column, full = (slots[name].shape for name in ("v_row", "v_col", "v"))
    factored = len(shape) > 1 and full == PLACEHOLDER
    if not factored and (full != shape or row != PLACEHOLDER or column != PLACEHOLDER):
        return f"has v {full}, v_row {row} and v_col {column}, which don't fit shape {shape}"
    if factored and not _pairs(shape, row, column):
        return (
            f"has v_row {row} and v_col {column}, which aren't the means over the two largest axes of {shape}"
        )
    return Factoring(shape, factored, sorted(shape)[-2] if len(shape) > 1 else 0)


def rule_of(shape: Shape, slots: Mapping[str, Tensor], factored: bool) -> Rule:
    """Returns the rule of a parameter; assumed where equal axes leave it open."""
    if not factored:
        return Rule((Axis.NONE,) * len(shape), "file")
    pairs = _pairs(shape, slots["v_row"].shape, slots["v_col"].shape)
    usual = usual_axes(shape)
    if len(pairs) > 1 and usual in pairs:
        return Rule(usual, "file" if len(shape) <= _SETTLED_RANK else "assumed")
    return Rule(pairs[0], "file" if len(pairs) == 1 else "assumed")


def usual_axes(shape: Shape) -> tuple[Axis, ...]:
    """Returns how Optax on this machine factors a shape, if it does."""
    return by_shape(variant_constants("adafactor", "optax"), shape, True)


def _pairs(shape: Shape, row: Shape, column: Shape) -> list[tuple[Axis, ...]]:
    """Returns every labelling by the two largest axes that gives slots of these shapes."""
    fitting = []
    for largest, second in itertools.permutations(range(len(shape)), 2):
        others = [n for i, n in enumerate(shape) if i not in (largest, second)]
        if shape[largest] >= shape[second] >= max(others, default=0):
            axes = [Axis.NONE] * len(shape)
            axes[largest], axes[second] = Axis.COLUMN, Axis.ROW
            rule = Rule(tuple(axes), "file")
            if (rule.slot_shape("v_row", shape), rule.slot_shape("v_col", shape)) == (row, column):
                fitting.append(rule.axes)
    return fitting
