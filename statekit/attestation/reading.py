"""What one reading of a checkpoint shows of its values: every tensor is read once, block by block, and nothing is kept.

A parameter and its master are read together, so that neither is read twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from blake3 import blake3

from statekit.errors import FormatError, NotFoundError, StatekitError
from statekit.pipeline import ahead, passed
from statekit.state.factoring import FACTORED
from statekit.state.run import BUFFERS
from statekit.state.stored_params import MASTER
from statekit.state.train_state import Axis, Rule, TrainState
from statekit.tensors.digest import little_endian
from statekit.tensors.tensor import BLOCK_BYTES, Array, Index, Tensor, blocks, float_info, nbytes, rounded

Key: TypeAlias = tuple[str, str]
"""A parameter's path and the name of its slot, "" for the parameter itself; of a group `groups/<i>` is the path."""
OnTensor: TypeAlias = Callable[[str, int], object]
SKETCH = 4096
"""Values of a factored moment that are kept to be compared with the next step's."""


@dataclass
class Reading:
    """What the values of a tensor are like.

    Attributes:
        digest: Of their bytes.
        size: How many there are.
        is_zero: Whether all are zero, of either sign.
        is_finite: Whether none is NaN or infinite.
        is_negative: Whether one is below zero.
        squares: Sum of their squares in float64, where it was asked for.
        means: Of v_row and v_col, their means over the axes that either averages: along BATCH and NONE axes.
        sketch: Of v_row and v_col of a square parameter, their first values.
        unrounded: Of a master, how many values its parameter isn't the rounding of.
    """

    digest: str = ""
    size: int = 0
    is_zero: bool = True
    is_finite: bool = True
    is_negative: bool = False
    squares: float | None = None
    means: Array | None = None
    sketch: Array | None = None
    unrounded: int = 0

    def add(self, block: Array) -> None:
        """Takes a block into account."""
        self.size += block.size
        low, high, finite = _extremes(block)
        self.is_zero = self.is_zero and finite and low == high == 0
        self.is_finite = self.is_finite and finite
        self.is_negative = self.is_negative or low < 0
        if self.squares is not None:
            wide = block.astype(np.float64).ravel()
            self.squares += float(wide @ wide)


@dataclass(frozen=True)
class Readings:
    """What all values of a state are like.

    Attributes:
        tensors: Of each tensor that could be read.
        damaged: Why others couldn't be.
        bytes_read: Bytes of values that were read.
    """

    tensors: Mapping[Key, Reading]
    damaged: Mapping[Key, StatekitError] = field(default_factory=dict)
    bytes_read: int = 0

    def digest(self, path: str, slot: str = "") -> str | None:
        """Returns the digest of a tensor; None if there is none."""
        reading = self.tensors.get((path, slot))
        return None if reading is None else reading.digest


def place(key: Key) -> str:
    """Returns the canonical name of a tensor."""
    path, slot = key
    if path.startswith(("groups/", f"{BUFFERS}/")):
        return f"{path}/{slot}".rstrip("/")
    return f"slots/{path}/{slot}" if slot else f"params/{path}"


def readings(state: TrainState, on_tensor: OnTensor = lambda name, size: None) -> Readings:
    """Reads every parameter, slot and buffer of a state once.

    Args:
        state: The state.
        on_tensor: Told the canonical name and the size in bytes of each tensor before it is read.
    """
    tensors: dict[Key, Reading] = {}
    damaged: dict[Key, StatekitError] = {}
    total = 0
    for keys, together in _tensors(state):
        for key, tensor in zip(keys, together, strict=True):
            on_tensor(place(key), nbytes(tensor))
            total += nbytes(tensor)
        begun = [_begun(state, key, tensor) for key, tensor in zip(keys, together, strict=True)]
        try:
            _read(state, keys, together, begun)
        except (FormatError, NotFoundError) as error:
            damaged.update(dict.fromkeys(keys, error))
            continue
        tensors.update(zip(keys, begun, strict=True))
    return Readings(tensors, damaged, total)


def _tensors(state: TrainState) -> Iterator[tuple[tuple[Key, ...], tuple[Tensor, ...]]]:
    """Yields what is read together: a parameter with its master, all else by itself."""
    for path, param in state.params.items():
        slots = dict(state.slots.get(path, {}))
        master = slots.pop(MASTER, None)
        if master is not None and master.shape == param.shape:
            yield ((path, ""), (path, MASTER)), (param, master)
        else:
            yield ((path, ""),), (param,)
        for name, slot in slots.items():
            yield ((path, name),), (slot,)
    for i, group in enumerate(state.optimizer.groups):
        for name, slot in group.slots.items():
            yield ((f"groups/{i}", name),), (slot,)
    buffers = state.extra.get(BUFFERS)
    for name, buffer in buffers.items() if isinstance(buffers, Mapping) else ():
        if isinstance(buffer, Tensor):
            yield ((f"{BUFFERS}/{name}", ""),), (buffer,)


def _begun(state: TrainState, key: Key, tensor: Tensor) -> Reading:
    """Returns the reading of a tensor before its first block, with what will be asked of it."""
    (path, slot), reading = key, Reading()
    if "param_rms" in state.slots.get(path, {}) and slot in ("", "delta", "param_rms", "scale_grads"):
        reading.squares = 0.0
    rule = state.rules.get(path)
    if slot in FACTORED and rule is not None and len(rule.kept(slot)) == len(tensor.shape):
        reading.means = np.zeros([tensor.shape[i] for i in _along(rule, slot)])
        if {*FACTORED} <= state.slots[path].keys() and is_ambiguous(rule, state.params[path].shape):
            reading.sketch = np.zeros(0)
    return reading


def is_ambiguous(rule: Rule, shape: Sequence[int]) -> bool:
    """Tells whether v_row and v_col of a parameter have the same shape, so that nothing tells them apart by it."""
    return rule.factored and rule.slot_shape("v_row", tuple(shape)) == rule.slot_shape("v_col", tuple(shape))


def _along(rule: Rule, slot: str) -> list[int]:
    """Returns the axes of v_row or v_col that both have."""
    return [i for i, axis in enumerate(rule.kept(slot)) if rule.axes[axis] in (Axis.BATCH, Axis.NONE)]


def _read(
    state: TrainState, keys: Sequence[Key], tensors: Sequence[Tensor], readings_of: Sequence[Reading]
) -> None:
    """Reads tensors of one shape, block by block."""
    hashers = [blake3() for _ in tensors]
    widest = max(tensors, key=lambda tensor: tensor.dtype.itemsize)

    def read() -> Iterator[tuple[Index, list[Array]]]:
        for index in blocks(widest):
            yield index, [np.ascontiguousarray(tensor.read(index)) for tensor in tensors]

    pieces = passed(read())
    for index, parts in ahead(pieces) if nbytes(widest) > BLOCK_BYTES else pieces:
        for key, part, reading, hasher in zip(keys, parts, readings_of, hashers, strict=True):
            hasher.update(little_endian(part))
            reading.add(part)
            if reading.means is not None:
                _add_means(reading, state.rules[key[0]], key[1], index, part)
            if reading.sketch is not None and len(reading.sketch) < SKETCH:
                reading.sketch = np.append(reading.sketch, part.astype(np.float64).ravel()[:SKETCH])[:SKETCH]
        if len(parts) == 2:
            param, master = parts
            readings_of[1].unrounded += _unequal(rounded(master, param.dtype), param)
    for key, tensor, reading, hasher in zip(keys, tensors, readings_of, hashers, strict=True):
        reading.digest = hasher.hexdigest()
        if reading.means is not None and reading.size:
            kept = _along(state.rules[key[0]], key[1])
            reading.means *= math.prod(tensor.shape[i] for i in kept) / reading.size


def _add_means(reading: Reading, rule: Rule, slot: str, index: Index, part: Array) -> None:
    kept = _along(rule, slot)
    gone = tuple(i for i in range(part.ndim) if i not in kept)
    assert reading.means is not None
    reading.means[tuple(index[i] for i in kept)] += part.astype(np.float64).sum(axis=gone)


def _extremes(block: Array) -> tuple[float, float, bool]:
    """Returns the smallest and the largest value of a block, 0 and 0 of an empty one, and whether all are finite.

    Of floating-point numbers the bits are looked at: their order is that of the numbers, and no block is copied.
    """
    if not block.size:
        return 0, 0, True
    if block.dtype.kind in "biu":
        return int(block.min()), int(block.max()), True
    if block.dtype.kind == "c":
        parts = block.view(block.real.dtype)
        return 0, float(np.max(np.abs(parts))), bool(np.isfinite(parts).all())
    if block.dtype.itemsize == 1:  # of float8 some have no infinity, and some another NaN
        wide = block.astype(np.float32)
        finite = np.isfinite(wide)
        wide[~finite] = 0
        return float(wide.min()), float(wide.max()), bool(finite.all())
    bits, size = block.view(f"i{block.dtype.itemsize}"), block.dtype.itemsize
    above = max(0, int(bits.max()))
    below = max(0, int(bits.view(f"u{size}").max()) - (1 << (8 * size - 1)))  # less the sign: a magnitude
    infinite = int(np.asarray(np.inf, block.dtype).view(bits.dtype))
    return (0 if below > infinite else -below), above, max(above, below) < infinite  # a NaN may have a sign


def _unequal(left: Array, other: Array) -> int:
    """Returns how many values of two blocks differ; NaN equals NaN."""
    bits = [np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}") for values in (left, other)]
    different = bits[0] != bits[1]
    if not different.any():
        return 0
    pairs = [values[different].astype(np.float64) for values in (left, other)]
    return int(np.count_nonzero(~((pairs[0] == pairs[1]) | (np.isnan(pairs[0]) & np.isnan(pairs[1])))))


def precision(tensor: Tensor) -> float:
    """Returns how far one rounding may take a number of a tensor's dtype, relative to it; 0.0 of whole numbers."""
    if tensor.dtype.kind in "biu":
        return 0.0
    return float(2.0 ** -(float_info(tensor.dtype).nmant + 1))
