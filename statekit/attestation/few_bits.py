"""What is wrong with moments in few bits that their values alone don't show: their levels, scales and codes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from statekit.attestation.attestation import Finding
from statekit.attestation.faults import fault
from statekit.state.train_state import TrainState
from statekit.tensors.quantized import SMALLEST_SCALE, Quantized
from statekit.tensors.tensor import blocks, scalar

NAME = "quantized-damaged"
_SLACK = 4.0
"""How far the first moment may lie above its bound: rounding to levels carries it over by less (docs/bounds.md)."""


def damaged_parts(state: TrainState) -> Iterator[Finding]:
    """Yields levels that aren't in order, negative scales, moments without values, and scales beyond their bound.

    Reads levels and scales; codes only of a moment whose scales have values.
    """
    for path, slots in state.slots.items():
        moments = {name: slot for name, slot in slots.items() if isinstance(slot, Quantized)}
        place, empty = f"slots/{path}", {name: _is_empty(slot) for name, slot in moments.items()}
        for name, slot in moments.items():
            for expected, seen in _of_parts(slot):
                yield fault(NAME, [f"{place}/{name}"], expected, seen)
            if empty[name] and not all(empty.values()):
                yield fault(
                    NAME, [f"{place}/{name}"], "values, as the other moment has", "codes or scales of none"
                )
        if moments.keys() >= {"m", "v"} and not any(empty.values()):
            yield from _of_scales(state, path, moments["m"], moments["v"])


def _of_parts(slot: Quantized) -> Iterator[tuple[str, str]]:
    """Yields what parts should be and aren't."""
    if slot.levels is not None:
        levels = slot.levels.read()
        if not (np.isfinite(levels).all() and (np.diff(levels) > 0).all() and np.abs(levels).max() <= 1):
            yield "levels in ascending order, up to 1", "others"
    if (slot.scale.read() < 0).any():
        yield "scales from 0 on", "negative ones"


def _is_empty(slot: Quantized) -> bool:
    """Tells whether all scales are those of zeros, or all codes the same."""
    if not (slot.scale.read() > SMALLEST_SCALE).any():
        return True
    first = None
    for index in blocks(slot.codes):
        codes = slot.codes.read(index).view(np.uint8)
        first = codes.flat[0] if first is None else first
        if (codes != first).any():
            return False
    return True


def _of_scales(state: TrainState, path: str, first: Quantized, second: Quantized) -> Iterator[Finding]:
    """Yields blocks whose first moment is larger than any gradients make it beside their second.

    By Cauchy and Schwarz m^2 <= (1 - beta1)^2 / ((1 - beta2) (1 - beta1^2 / beta2)) v, from zeros on; so are the
    largest of a block.
    """
    group = state.group_of(path)
    values = {} if group is None else group.hyperparameters
    beta1, beta2 = (scalar(values.get(name)) for name in ("beta1", "beta2"))
    is_known = isinstance(beta1, float) and isinstance(beta2, float) and 0 <= beta1 * beta1 < beta2 < 1
    if not is_known or first.block != second.block or first.scale.shape != second.scale.shape:
        return
    bound = (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2))
    tops = [
        slot.scale.read().astype(np.float64) * (448 if slot.levels is None else 1) for slot in (first, second)
    ]
    with np.errstate(all="ignore"):
        beyond = np.flatnonzero(tops[0] > _SLACK * bound * np.sqrt(np.maximum(tops[1], SMALLEST_SCALE)))
    if beyond.size:
        expected = f"at most {bound:.3g} times the root of the second moment's scale"
        yield fault(
            NAME, [f"slots/{path}/m"], expected, f"more in {beyond.size} blocks, the first {int(beyond[0])}"
        )
