"""Adafactor's second moment as implementations store it, where that isn't just the slots that are in use.

An averaged axis may stay with size 1, a slot that isn't in use may have a placeholder, and a factored parameter may
store its whole estimate beside what it follows from: `reduced_axis`, `placeholders` and `redundant_v` in
`schemas/adafactor.json`. Canonically there is only what is in use, without averaged axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from statekit.state.constants import variant_constants
from statekit.state.train_state import Axis, Rule
from statekit.tensors.tensor import DType, Filled, Shape, Tensor

FACTORED, WHOLE = ("v_row", "v_col"), ("v",)
PLACEHOLDER: Shape = (1,)
"""The shape of `zeros_1`: also where a layout has to tell from shapes alone which slots are in use."""
_UNUSED = "stands for a slot that isn't in use"


def unused(rule: Rule) -> tuple[str, ...]:
    """Returns the slots of the second moment that a parameter doesn't use."""
    return WHOLE if rule.factored else FACTORED


def is_derived(variant: str, slot: str, rule: Rule) -> bool:
    """Tells whether an implementation stores in a slot what follows from the two that are in use."""
    return rule.factored and slot in WHOLE and variant_constants("adafactor", variant)["redundant_v"]


def placeholder(variant: str, slot: str, dtype: DType) -> Tensor | None:
    """Returns what an implementation stores for a slot that isn't in use; None if nothing.

    Args:
        variant: The implementation.
        slot: Canonical name.
        dtype: Of a placeholder that is of the slots' own dtype.

    Example:
        >>> placeholder("optax", "v", np.dtype("float32")).shape, placeholder("torch", "v", np.dtype("float32"))
        ((1,), None)
    """
    kind = variant_constants("adafactor", variant)["placeholders"]
    if kind == "zeros_1":
        return Filled(PLACEHOLDER, dtype, reason=_UNUSED)
    if kind == "int32_scalar" and slot in FACTORED:
        return Filled((), np.dtype(np.int32), reason=_UNUSED)
    return None


def with_placeholders(
    variant: str, slots: Mapping[str, Tensor], names: Iterable[str], dtype: DType
) -> dict[str, Tensor]:
    """Returns slots with an implementation's placeholders under those of the names that have none."""
    empty = {name: placeholder(variant, name, dtype) for name in names if name not in slots}
    return {**slots, **{name: tensor for name, tensor in empty.items() if tensor is not None}}


def stored_shape(variant: str, slot: str, rule: Rule, shape: Shape) -> Shape:
    """Returns the shape in which an implementation stores a slot that is in use.

    Args:
        variant: The implementation.
        slot: Canonical name, of any slot.
        rule: How the parameter is factored.
        shape: The parameter's.

    Example:
        >>> rule = Rule((Axis.ROW, Axis.COLUMN), "file")
        >>> stored_shape("torch", "v_row", rule, (4, 3)), stored_shape("optax", "v_row", rule, (4, 3))
        ((4, 1), (4,))
    """
    if slot not in FACTORED:
        return shape
    if variant_constants("adafactor", variant)["reduced_axis"] == "dropped":
        return rule.slot_shape(slot, shape)
    gone = rule.dims(Axis.COLUMN if slot == "v_row" else Axis.ROW)
    return tuple(1 if i in gone else n for i, n in enumerate(shape))
