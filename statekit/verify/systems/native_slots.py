"""The second moment of an Adafactor in recordings, which hold it as the implementation does (state/factoring.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from statekit.errors import FormatError
from statekit.state.factoring import FACTORED, is_derived, placeholder, stored_shape, unused
from statekit.state.train_state import Axis, Rule
from statekit.tensors.tensor import Shape, Tensor, in_memory
from statekit.tensors.views import Squeezed


def canonical_slots(
    variant: str, rule: Rule, param: Tensor, recorded: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the slots that a parameter has, of what a recording holds for it under their names.

    Raises:
        FormatError: A slot that isn't in use holds something else than its placeholder.
    """
    slots: dict[str, Tensor] = {}
    for name, tensor in recorded.items():
        if name in unused(rule):
            _check_unused(variant, name, rule, param, tensor)
        elif name in FACTORED:
            slots[name] = _shaped(tensor, rule.slot_shape(name, param.shape))
        else:
            slots[name] = tensor
    return slots


def native_slots(
    variant: str, rule: Rule, param: Tensor, slots: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields what a recording holds of a parameter's slots, by their canonical names."""
    for name, tensor in slots.items():
        yield name, _shaped(tensor, stored_shape(variant, name, rule, param.shape))
    for name in unused(rule):
        stored = placeholder(variant, name, param.dtype)
        if is_derived(variant, name, rule):
            yield name, in_memory(_estimate(rule, slots), name)
        elif stored is not None:
            yield name, stored


def _shaped(tensor: Tensor, shape: Shape) -> Tensor:
    return tensor if tensor.shape == shape else Squeezed(tensor, shape)


def _check_unused(variant: str, name: str, rule: Rule, param: Tensor, tensor: Tensor) -> None:
    stored = placeholder(variant, name, param.dtype)
    fits = stored is not None and (tensor.shape, tensor.dtype) == (stored.shape, stored.dtype)
    if not (fits and not tensor.read().any()) and not is_derived(variant, name, rule):
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
