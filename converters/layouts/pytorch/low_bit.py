"""AdamW whose moments lie in few bits, as bitsandbytes and torchao keep them: one layout for each precision.

Every layout reads and writes what `torch-optim` does, with the moments' records of its library in their place.
Codes, scales and levels are never made anew where the state has them; a moment in float32 stays as it is beside others
in few bits, as of a parameter that its library keeps so. Where no moment of the state is in few bits, those of
parameters from 4096 elements on are quantized, which the plan calls lossy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.pytorch import native
from statekit.converters.layouts.pytorch.lines import CLASS, OPTIONS
from statekit.converters.layouts.pytorch.parts import is_nested, names_of, nodes
from statekit.converters.layouts.pytorch.torch_optim import TorchOptim
from statekit.errors import Faults, InexactError, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.train_state import TrainState
from statekit.tensors.quantized import FLOAT32, Quantized, dynamic_levels, linear_levels, quantized
from statekit.tensors.tensor import Cast, DType, Tensor, scalar
from statekit.tensors.tree import put, walk

Optimizer: TypeAlias = Mapping[str, Any]
"""A state_dict()."""
MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}
"""The slots that may lie in few bits, and PyTorch's names of them."""
_SMALLEST = 4096
"""Elements from which on both libraries keep a parameter's moments in few bits."""
_CONTAINERS = ("torch", "hf-trainer", "accelerate", "safetensors", "dcp")
_OPTIONS = ("lr", "betas", "eps", "weight_decay")
"""Arguments of the libraries' optimizers."""
_OFF = ("amsgrad", "maximize")
"""Options of PyTorch's AdamW that neither library has, or can step with."""


@dataclass(frozen=True)
class Precision:
    """In how many bits moments lie.

    Attributes:
        bits: 8 or 4.
        block: How many values share a scale.
        is_float8: Whether codes are float8 numbers, without levels.
        only_whole_blocks: Whether a parameter that isn't a multiple of the block stays in float32.
        any_block: Whether the library takes a state with other blocks as it is, as one of its options says.
    """

    bits: int
    block: int
    is_float8: bool = False
    only_whole_blocks: bool = True
    any_block: bool = False

    def levels(self, slot: str) -> Tensor | None:
        """Returns what codes of a slot stand for; None of float8. The second moment has no sign."""
        if self.is_float8:
            return None
        return linear_levels() if (self.bits, slot) == (4, "v") else dynamic_levels(self.bits, slot == "m")

    def takes(self, tensor: Tensor) -> bool:
        """Tells whether a parameter of this shape has its moments in few bits."""
        count = math.prod(tensor.shape)
        return count >= _SMALLEST and not (self.only_whole_blocks and count % self.block)

    def has(self, tensor: Tensor) -> bool:
        """Tells whether a tensor is of this precision already."""
        return (
            isinstance(tensor, Quantized)
            and (tensor.bits, tensor.levels is None) == (self.bits, self.is_float8)
            and (self.any_block or tensor.block == self.block)
            and len(tensor.scale.shape) == 1
            and not (self.only_whole_blocks and math.prod(tensor.shape) % tensor.block)
        )


class Library(Protocol):
    """How a library writes a state_dict() whose moments are in few bits."""

    def precision_of(self, optimizer: Optimizer) -> Precision | str | None:
        """Returns the precision of a state_dict(): `float32` where nothing is in few bits, None if it isn't its own."""

    def plain(self, optimizer: Optimizer, place: object) -> Optimizer:
        """Returns a state_dict() in the form of PyTorch's, with `Quantized` moments.

        Raises:
            StateError: A moment's parts don't fit each other.
        """

    def native(self, optimizer: Optimizer, dtypes: Mapping[Any, DType], is_old: bool) -> Optimizer:
        """Returns a state_dict() in the library's form; undoes `plain`.

        Args:
            optimizer: In the form of PyTorch's.
            dtypes: The dtype of each parameter, by its key in the state.
            is_old: Whether it came in the form of the library's earlier releases.
        """

    def is_old(self, optimizer: Optimizer) -> bool:
        """Tells whether a state_dict() is in the form of the library's earlier releases."""

    @property
    def keeps_decoupled(self) -> bool:
        """Whether weight decay is always AdamW's."""


@dataclass(frozen=True)
class LowBit:
    """AdamW of a library that keeps its moments in few bits.

    Attributes:
        library: How it writes them.
        optimizer: Its class.
        precision: In how many bits; None for float32 in the library's own form.
        native_slots: Slots of the library's optimizers that have no schema, by the library's own names.
    """

    name: str
    title: str
    library: Library
    optimizer: str
    precision: Precision | None
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"adamw": ("torch",)})
    native_slots: tuple[str, ...] = ()
    containers: tuple[str, ...] = _CONTAINERS
    stores_values: bool = True
    names_from: tuple[str, ...] = ("config",)
    only_if_asked: bool = True

    @property
    def _torch(self) -> TorchOptim:
        return TorchOptim(self.name, self.title)

    @property
    def _old(self) -> str:
        """Key in `extra`: that the file is in the form of the library's earlier releases."""
        return f"{self.name}_old_form"

    def names_are_near(self, checkpoint: Checkpoint) -> str:
        """Returns `config` where the model's configuration lies beside its weights."""
        return self._torch.names_are_near(checkpoint)

    def names_in_file(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        """Returns the file's name of each parameter that the model in its configuration has under another one."""
        return self._torch.names_in_file(checkpoint)

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks at the records of the optimizers' states."""
        precisions = [self.library.precision_of(node) for _, node in _optimizers(checkpoint.tree)]
        precisions = [precision for precision in precisions if precision is not None]
        wanted: Precision | str = "float32" if self.precision is None else self.precision
        if not precisions or next((p for p in precisions if p != "float32"), "float32") != wanted:
            return None
        because = f"an optimizer of {self.optimizer.partition('.')[0]}, moments in {_words(self.precision)}"
        try:
            plain = self._plain(checkpoint)
        except StateError:  # no library quantizes so little; of others, decoding says what is wrong
            return Evidence(22, because) if _has_large_codes(checkpoint.tree) else None
        return Evidence(22, because) if self._torch.detect(plain) else None

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state; moments in few bits read as the values that the next update starts from."""
        state = self._torch.decode(self._plain(checkpoint), hints)
        is_old = any(self.library.is_old(node) for _, node in _optimizers(checkpoint.tree))
        return replace(state, extra={**state.extra, self._old: True}) if is_old else state

    def encode(self, state: TrainState) -> Encoded:
        """Returns the file's tree, by index."""
        faults = Faults(self._misfits(state))
        faults.check(InexactError, f"The layout {self.name} can't hold the state")
        is_old = bool(state.extra.get(self._old))
        extra = {key: part for key, part in state.extra.items() if key != self._old}
        state = replace(state, slots=self._moments(state), extra=extra)
        names = names_of(state.extra, state.params)
        dtypes = {names[path]: param.dtype for path, param in state.params.items()}
        return self._native(self._torch.encode(state), dtypes, is_old)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        if state["schema"] == native.SCHEMA:  # nothing says which class it is of
            return self._torch.lines(state, saved)
        is_adam = not self.library.keeps_decoupled and all(
            group["hyperparameters"].get("decoupled_weight_decay") is False for group in state["groups"]
        )
        name = self.optimizer.replace("AdamW", "Adam") if is_adam else self.optimizer
        return self._torch.lines({**state, CLASS: name, OPTIONS: _OPTIONS}, saved)

    def _plain(self, checkpoint: Checkpoint) -> Checkpoint:
        tree = checkpoint.tree
        for path, node in _optimizers(tree):
            if self.library.precision_of(node) is not None:
                tree = _replaced(tree, path, self.library.plain(node, checkpoint.path))
        return replace(checkpoint, tree=tree)

    def _native(self, encoded: Encoded, dtypes: Mapping[str, DType], is_old: bool) -> Encoded:
        tree = encoded.tree
        for path, node in _optimizers(tree):
            by_key = {key: dtypes.get(name, FLOAT32) for key, name in _named(node)}
            tree = _replaced(tree, path, self.library.native(node, by_key, is_old))
        others = (encoded.by_name, encoded.side_by_side)
        by_name, other_state = (state and self._native(state, dtypes, is_old) for state in others)
        return replace(encoded, tree=tree, by_name=by_name, side_by_side=other_state)

    def _moments(self, state: TrainState) -> dict[str, dict[str, Tensor]]:
        """Returns a state's slots with moments in the library's precision."""
        tensors = [tensor for slots in state.slots.values() for tensor in slots.values()]
        is_low_bit = any(isinstance(tensor, Quantized) for tensor in tensors)
        return {
            path: {name: self._moment(name, tensor, is_low_bit) for name, tensor in slots.items()}
            for path, slots in state.slots.items()
        }

    def _moment(self, slot: str, tensor: Tensor, is_low_bit: bool) -> Tensor:
        if slot not in MOMENTS:
            stays = self.precision is not None or not isinstance(tensor, Quantized)
            return tensor if stays else Cast(tensor, FLOAT32)
        precision = self.precision
        if precision is not None and precision.has(tensor):
            return tensor
        # Beside moments in few bits, one in float32 is so because the run's optimizer keeps it so.
        stays = is_low_bit and tensor.to_json().get("op") == "stored"
        if precision is not None and precision.takes(tensor) and not stays:
            return quantized(tensor, precision.levels(slot), precision.block)
        if isinstance(tensor, Quantized):
            return Cast(tensor, FLOAT32)  # in float32, and not as its codes
        return tensor if tensor.dtype == FLOAT32 or stays else Cast(tensor, FLOAT32)

    def _misfits(self, state: TrainState) -> Iterator[tuple[str, str]]:
        """Yields what the library's optimizer can't go on with."""
        for schema, variant in state.optimizer.kinds:
            if schema not in self.variants:
                yield f"is {schema}, variant {variant}, expected {' or '.join(self.variants)}", "optimizer"
        for i, group in enumerate(state.optimizer.groups):
            values = group.hyperparameters
            for name in _OFF:
                if values.get(name):
                    yield f"{name} is on, and {self.optimizer} has no such option", f"groups/{i}"
            couples = values.get("decoupled_weight_decay") is False and values.get("weight_decay_rate")
            if couples and self.library.keeps_decoupled:
                yield (
                    f"weight decay goes through the gradient, as in Adam; {self.optimizer} has AdamW's",
                    f"groups/{i}",
                )
        for path, slots in state.slots.items():
            owner = state.group_of(path)
            is_native = owner is not None and state.optimizer.kind(owner)[0] == native.SCHEMA
            places = self.native_slots if is_native else MOMENTS
            for name in slots.keys() - {*places}:
                yield f"has slot {name}, for which there is no place", path


def _has_large_codes(tree: Any) -> bool:
    """Tells whether an optimizer's state holds codes of as many values as a library quantizes."""
    leaves = (leaf for _, node in _optimizers(tree) for _, leaf in walk(node["state"]))
    codes = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype.itemsize == 1)
    return any(2 * math.prod(leaf.shape) >= _SMALLEST for leaf in codes)


def _optimizers(tree: Any) -> Iterator[tuple[tuple[Any, ...], Optimizer]]:
    """Yields every state_dict() of an optimizer near the top of a tree, with its path."""
    for path, node in list(nodes(tree, None)):
        if is_nested(node):
            yield path, node


def _replaced(tree: Any, path: Sequence[Any], part: Any) -> Any:
    return put(tree, tuple(path), part) if path else part


def _named(optimizer: Optimizer) -> Iterator[tuple[Any, str]]:
    """Yields each parameter's key in an optimizer's state, and its name."""
    for group in optimizer["param_groups"]:
        yield from zip(group["params"], group.get("param_names", group["params"]), strict=True)


def _words(precision: Precision | None) -> str:
    if precision is None:
        return "float32"
    return "float8" if precision.is_float8 else f"{precision.bits} bits"


def without_off(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group without the options that no library here has; `LowBit` saw to it that they are off."""
    return {key: value for key, value in group.items() if key not in (*_OFF, "decoupled_weight_decay")}


def number_of(step: Any) -> Any:
    """Returns a count as an int; anything else as it is."""
    count = scalar(step)
    return int(count) if isinstance(count, float) and count.is_integer() else count
