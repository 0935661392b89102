"""A live run in PyTorch as a checkpoint in memory, so that layouts decode it as they decode files."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from statekit.arrays.backend import backend
from statekit.conversion import registry
from statekit.conversion.contracts import NO_HINTS
from statekit.errors import StateError
from statekit.files.checkpoint import Checkpoint
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import DTYPES, Array, DType, Index, Shape, index_shape, normal_index
from statekit.tensors.tree import Tree
from statekit.torch.sharding import FlatPart, is_sharded, own_part
from statekit.torch.slots import dtype_of

LIVE = Path("the live run")


@dataclass(frozen=True)
class LiveTensor:
    """A tensor in memory, on whatever device; of a sharded one, the part that this process has."""

    value: torch.Tensor
    name: str

    @property
    def shape(self) -> Shape:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> DType:
        return dtype_of(self.value)

    @property
    def grain(self) -> Shape:
        return self.shape

    @property
    def parts(self) -> tuple[Index, ...] | None:
        """The one block that this process has; None if it has everything."""
        if not is_sharded(self.value):
            return None
        local, start = own_part(self.value)
        return (tuple(slice(i, i + n) for i, n in zip(start, local.shape, strict=True)),)

    def read(self, index: Index | None = None) -> Array:
        """Reads a block; of a sharded tensor it must lie in its part."""
        if self.value.is_meta or self.value.layout != torch.strided:
            raise StateError("A live tensor is sparse, or has no values.", place=self.name)
        bounds = normal_index(index, self.shape)
        local, start = own_part(self.value)
        inside = tuple(slice(cut.start - i, cut.stop - i) for cut, i in zip(bounds, start, strict=True))
        block = backend("torch").numpy(local[inside])
        return block.reshape(index_shape(bounds))

    def to_json(self) -> dict[str, Any]:
        return {"op": "live", "name": self.name, "shape": list(self.shape), "dtype": self.dtype.name}


@dataclass(frozen=True)
class LiveSlice:
    """What this process has of a tensor that FSDP1 keeps flat.

    Attributes:
        value: The elements that are here, flat.
        part: Which they are.
        name: What the tensor is called.
    """

    value: torch.Tensor
    part: FlatPart
    name: str

    @property
    def shape(self) -> Shape:
        return self.part.shape

    @property
    def dtype(self) -> DType:
        return dtype_of(self.value)

    @property
    def grain(self) -> Shape:
        return self.shape

    @property
    def parts(self) -> tuple[Index, ...]:
        """The blocks that this process has."""
        return self.part.blocks()

    def read(self, index: Index | None = None) -> Array:
        """Reads a block, which must lie in what this process has."""
        bounds = normal_index(index, self.shape)
        places = np.zeros((), np.int64)
        for cut, length in zip(bounds, self.shape, strict=True):
            places = places[..., None] * length + np.arange(cut.start, cut.stop)
        local = backend("torch").numpy(self.value)
        return np.asarray(local[places.reshape(index_shape(bounds)) - self.part.start])

    def to_json(self) -> dict[str, Any]:
        return {"op": "live", "name": self.name, "shape": list(self.shape), "dtype": self.dtype.name}


def is_dense(value: torch.Tensor) -> bool:
    """Tells whether a tensor has values in memory, of a dtype that NumPy has or statekit adds to it."""
    if torch.nn.parameter.is_lazy(value) or value.is_meta:
        return False
    return value.layout == torch.strided and str(value.dtype).removeprefix("torch.") in DTYPES


def live_tree(value: Any, name: str = "") -> Tree:
    """Returns what a `state_dict` holds as an inert tree; what is no plain value is left out."""
    if isinstance(value, LiveSlice):
        return value
    if isinstance(value, torch.Tensor):
        return LiveTensor(value.detach(), name)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: live_tree(part, f"{name}/{key}") for key, part in value.items() if _is_plain(part)}
    if isinstance(value, (list, tuple)):
        return type(value)(
            [live_tree(part, f"{name}/{i}") for i, part in enumerate(value) if _is_plain(part)]
        )
    return value


def _is_plain(value: Any) -> bool:
    kinds = (bool, int, float, str, bytes, np.generic, torch.Tensor, LiveSlice, Mapping, list, tuple)
    return value is None or isinstance(value, kinds)


def live_checkpoint(
    params: Mapping[str, torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    beside: Mapping[str, Any],
    flat: Mapping[int, FlatPart] = {},
    buffers: Mapping[str, torch.Tensor] = {},
) -> Checkpoint:
    """Returns what is live in the form in which a file of PyTorch is read.

    Args:
        params: The model's parameters by name.
        optimizers: What makes the updates, one or several that share the parameters; of their tensors, those that
            aren't among the parameters are left out.
        beside: What else the run has, by the name that it has in checkpoints: states of a scheduler, a scaler.
        flat: What this process has of parameters that FSDP1 keeps flat, by their `id`.
        buffers: The model's other tensors by name, as its `state_dict` has them.
    """
    names = {id(param): name for name, param in params.items()}
    model = {
        name: LiveSlice(param.detach(), flat[id(param)], name) if id(param) in flat else param
        for name, param in params.items()
    }
    states = [named_state(optimizer, names, flat) for optimizer in optimizers]
    parts = {"optimizer": states[0]} if len(states) == 1 else {"optimizers": states}
    tree = live_tree({"model": {**model, **buffers}, **parts, **beside})
    return Checkpoint("torch", LIVE, tree)


def live_state(checkpoint: Checkpoint) -> TrainState:
    """Returns the canonical state of a live run, decoded from `live_checkpoint`.

    Raises:
        StateError: The state breaks its layout's rules.
        UnknownFormatError: No layout knows the optimizer.
    """
    layout, _ = registry.detect_layout(checkpoint)
    return registry.decoded(layout, checkpoint, NO_HINTS)


def named_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], flat: Mapping[int, FlatPart] = {}
) -> dict[str, Any]:
    """Returns an optimizer's `state_dict` in which groups name their parameters; tensors without a name are left out.

    Args:
        optimizer: The optimizer.
        names: Name of each parameter by its `id`.
        flat: What this process has of parameters that FSDP1 keeps flat, by their `id`; of their slots it is as much.
    """
    try:
        saved = optimizer.state_dict()
    except Exception as error:  # of a class of the user's
        raise StateError(
            "The live optimizer doesn't give its state.",
            place=type(optimizer).__name__,
            found=f"{type(error).__name__}: {error}",
            remedy="give the optimizer that it wraps",
        ) from error
    groups: list[dict[str, Any]] = []
    gone: set[Any] = set()
    for group, stored in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        pairs = zip(stored["params"], group["params"], strict=True)
        name_of = {index: names.get(id(param)) for index, param in pairs}
        gone |= {index for index, name in name_of.items() if name is None}
        named = {index: name for index, name in name_of.items() if name is not None}
        options = _read_by(optimizer, stored)
        groups.append({**options, "params": list(named), "param_names": list(named.values())})
    state = {index: slots for index, slots in saved["state"].items() if index not in gone}
    for group, stored in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for index, param in zip(stored["params"], group["params"], strict=True):
            if id(param) in flat and index in state:
                state[index] = {
                    name: _sliced(value, flat[id(param)], name) for name, value in state[index].items()
                }
    return {**saved, "state": state, "param_groups": groups}


_OF_TORCH = "torch.optim"
_OF_ANY = frozenset({"differentiable"})
"""Defaults that loading a state gives any class. Source: pytorch/pytorch torch/optim/optimizer.py, `__setstate__`."""


def _read_by(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's options without those that another class of PyTorch's left there, when its state was loaded.

    By them the state would pass for that class', whose rule the live one doesn't follow.
    """
    if not type(optimizer).__module__.startswith(_OF_TORCH):
        return dict(group)
    foreign = _options_of_torch() - optimizer.defaults.keys()
    return {key: value for key, value in group.items() if key not in foreign}


@cache
def _options_of_torch() -> frozenset[str]:
    """Returns the options of PyTorch's own optimizers; one that newer releases know of each is left out."""
    classes = (kind for kind in vars(torch.optim).values() if isinstance(kind, type))
    names = (
        inspect.signature(kind).parameters for kind in classes if issubclass(kind, torch.optim.Optimizer)
    )
    return frozenset(name for some in names for name in some) - {"params", "decoupled_weight_decay"}


def unread_options(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns what a class of PyTorch or Transformers reads in its groups and one of them lacks."""
    if not type(optimizer).__module__.startswith((_OF_TORCH, "transformers.optimization")):
        return []
    needed = optimizer.defaults.keys() - _OF_ANY
    return sorted({key for group in optimizer.param_groups for key in needed - group.keys()})


def _sliced(value: Any, part: FlatPart, name: str) -> Any:
    """Returns a slot of a flat parameter as a slice, if it has one element for each element of the parameter."""
    is_slice = isinstance(value, torch.Tensor) and tuple(value.shape) == (part.count,)
    return LiveSlice(value.detach(), part, name) if is_slice else value
