"""Tied parameters: one tensor under several names, as a head that shares its weight with an embedding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from statekit.tensors.tensor import Stored, Tensor

TIES = "ties"
"""Key, in a state's extra and in trees of PyTorch's libraries: further name -> the name that a tensor stands under."""


def bytes_of(tensor: Tensor) -> Any:
    """Returns what two tensors have in common that read the same bytes."""
    return tensor.fetch if isinstance(tensor, Stored) else id(tensor), tensor.shape, tensor.dtype


def apart(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a model without the further names of tied tensors: an optimizer has each once."""
    ties = ties_of(model, model)
    return {name: tensor for name, tensor in model.items() if name not in ties}


def ties_of(model: Mapping[str, Tensor], known: Iterable[str]) -> dict[str, str]:
    """Returns the further names of a model's tensors: name -> the name that the same tensor stands under.

    Args:
        model: Tensor by name.
        known: The names whose tensors may have further ones; of two that are tied, the first stands.
    """
    first: dict[Any, str] = {}
    for name in known:
        first.setdefault(bytes_of(model[name]), name)
    ties = {name: first.get(bytes_of(tensor), name) for name, tensor in model.items()}
    firsts = set(first.values())
    return {name: one for name, one in ties.items() if name != one and name not in firsts}
