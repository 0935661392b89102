"""How implementations of Adafactor keep the second moment, where that isn't just v_row and v_col, or v.

An averaged axis may stay with size 1, a slot that isn't in use may have a placeholder, and a factored parameter may
store its estimate beside what it follows from: `reduced_axis`, `placeholders` and `redundant_v` in
`schemas/adafactor.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from statekit.errors import FormatError
from statekit.state.train_state import Axis, Rule
from statekit.tensors.tensor import DType, Filled, Tensor, in_memory

FACTORED, WHOLE = ("v_row", "v_col"), ("v",)
UNUSED = "stands for a slot that isn't in use"
PLACEHOLDERS: Mapping[str, Callable[[str, DType], Tensor | None]] = {
    "none": lambda name, dtype: None,
    "zeros_1": lambda name, dtype: Filled((1,), dtype, reason=UNUSED),
    "int32_scalar": lambda name, dtype: (
        Filled((), np.dtype(np.int32), reason=UNUSED) if name in FACTORED else None
    ),
}
"""What stands for an unused slot, by its name and the parameter's dtype."""


def canonical_slots(
    form: Mapping[str, Any], rule: Rule, param: Tensor, recorded: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the slots that a parameter has, of what a recording holds for it under their names.

    Raises:
        FormatError: A slot that isn't in use holds something else than its placeholder.
    """
    slots: dict[str, Tensor] = {}
    for name, tensor in recorded.items():
        if name in _unused(rule):
            _check_unused(form, name, param, tensor)
        elif name in FACTORED and form["reduced_axis"] == "kept":
            slots[name] = in_memory(tensor.read().reshape(rule.slot_shape(name, param.shape)), name)
        else:
            slots[name] = tensor
    return slots


def native_slots(
    form: Mapping[str, Any], rule: Rule, param: Tensor, slots: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields what a recording holds of a parameter's slots, by their canonical names."""
    for name, tensor in slots.items():
        if name in FACTORED and form["reduced_axis"] == "kept":
            gone = rule.dims(Axis.COLUMN if name == "v_row" else Axis.ROW)
            yield name, in_memory(np.expand_dims(tensor.read(), gone), name)
        else:
            yield name, tensor
    for name in _unused(rule):
        placeholder = PLACEHOLDERS[form["placeholders"]](name, param.dtype)
        if _derived(form, name):
            yield name, in_memory(_estimate(rule, slots), name)
        elif placeholder is not None:
            yield name, placeholder


def _unused(rule: Rule) -> tuple[str, ...]:
    return WHOLE if rule.factored else FACTORED


def _derived(form: Mapping[str, Any], name: str) -> bool:
    return name in WHOLE and bool(form["redundant_v"])


def _check_unused(form: Mapping[str, Any], name: str, param: Tensor, tensor: Tensor) -> None:
    placeholder = PLACEHOLDERS[form["placeholders"]](name, param.dtype)
    fits = placeholder is not None and (tensor.shape, tensor.dtype) == (placeholder.shape, placeholder.dtype)
    if not (fits and not tensor.read().any()) and not _derived(form, name):
        raise FormatError(
            "A slot that the parameter's rule doesn't use holds something.", place=name, found=tensor.shape
        )


def _estimate(rule: Rule, slots: Mapping[str, Tensor]) -> Any:
    row, column = (slots[name].read() for name in FACTORED)
    gone, kept = rule.dims(Axis.COLUMN), rule.dims(Axis.ROW)
    wide = np.expand_dims(row, gone)
    mean = np.mean(wide, axis=kept, keepdims=True)
    # Before the first update there is nothing to divide.
    scaled = np.divide(wide, mean, out=np.zeros_like(wide), where=mean != 0)
    return scaled * np.expand_dims(column, kept)
