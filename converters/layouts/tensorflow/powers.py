"""What TensorFlow 1's Adam has instead of a count: `beta1_power` and `beta2_power`, beta^(t+1) after t updates.

They are products in float32, one factor with each update, and tell beta itself as long as they haven't underflowed.

Source: tensorflow/tensorflow v1.15, python/training/adam.py, `_create_slots` and `_finish`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from statekit.errors import Faults
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.state.train_state import Group, TrainState
from statekit.tensors.tensor import Tensor, in_memory

POWERS: Mapping[str, str] = {"beta1_power": "beta1", "beta2_power": "beta2"}
"""Last part of a power's name -> the hyperparameter it is of."""
_TINY = np.finfo(np.float32).tiny
"""What is smaller TensorFlow's threads flush to zero."""
_BLOCK = 2**20
_DIGITS = 7
_USUAL = 5
"""Decimals that people give a beta at most. After few updates, any power is that of a beta of 7."""


def power_after(beta: float, updates: int) -> np.float32:
    """Returns beta^(updates + 1) as TensorFlow has it after so many updates."""
    product, left = np.float32(beta), updates
    while left and product >= _TINY:
        count = min(left, _BLOCK)
        factors = np.full(count + 1, np.float32(beta))
        factors[0] = product
        with np.errstate(under="ignore", over="ignore"):
            after = np.multiply.accumulate(factors)[-1]
        if after == product:  # so near to 1 that rounding takes the product back
            break
        product, left = after, left - count
    return product if product >= _TINY else np.float32(0)


def beta_of(power: np.float32, updates: int) -> float | None:
    """Returns the shortest decimal with that power; None without one, or if the power underflowed."""
    if not _TINY <= power < 1:
        return None
    root = float(power) ** (1 / (updates + 1))
    decimals = dict.fromkeys(round(root, digits) for digits in range(1, _DIGITS + 1))
    return next((beta for beta in decimals if power_after(beta, updates) == power), None)


def held_betas(
    others: Mapping[str, Any], assumed: Mapping[str, Any], updates: int
) -> dict[str, float | None]:
    """Returns what a checkpoint's powers tell of beta1 and beta2.

    Args:
        others: What the checkpoint holds beside variables and slots, by name.
        assumed: What beta1 and beta2 usually are.
        updates: How many updates were done.

    Returns:
        None where a power is of no decimal, so that it had another count. A power that is zero, as that of the usual
        value would be, tells nothing.
    """
    powers: dict[str, list[np.float32]] = {}
    for name, value in others.items():
        beta = POWERS.get(name.rpartition("/")[2])
        if beta and isinstance(value, Tensor) and value.shape == () and value.dtype == np.float32:
            powers.setdefault(beta, []).append(np.float32(value.read()))
    return {
        beta: beta_of(values[0], updates)
        for beta, values in powers.items()
        if len(values) == 1 and (values[0] or power_after(assumed[beta], updates))
    }


def contradicting_powers(checkpoint: Checkpoint, state: TrainState) -> Iterator[Finding]:
    """Yields the powers of a checkpoint that aren't those of the run's betas after the updates done.

    One that underflowed tells nothing. A product rounds once with each factor, in whatever order they are multiplied.
    """
    updates = state.counts.updates
    for name, tensor in checkpoint.tensors.items():
        beta = next((POWERS[part] for part in reversed(name.split("/")) if part in POWERS), None)
        if beta is None or tensor.shape != () or tensor.dtype != np.float32:
            continue
        power = float(tensor.read())
        if contradiction := _contradiction(power, beta, updates, state.optimizer.groups):
            yield Finding(f"is {power:g}: {contradiction}", name, kind="powers-disagree")


def _contradiction(power: float, beta: str, updates: int, groups: Sequence[Group]) -> str | None:
    """Returns why a power isn't that of the groups' beta after the updates done; None if it may be."""
    values = {group.hyperparameters.get(beta) for group in groups}
    (value,) = values if len(values) == 1 else (None,)
    if not isinstance(value, (int, float)):
        return f"it is of no {beta} after {updates} updates" if power and len(values) <= 1 else None
    due = float(power_after(value, updates))
    if power and not abs(power - due) <= (updates + 2) * 2.0**-23 * due:
        return f"{beta} {value:g} after {updates} updates makes {due:g}"
    inferred = all(group.known_from.get(beta) == "file" for group in groups)
    if inferred and round(value, _USUAL) != value:
        return f"after {updates} updates it would be of a {beta} of {value}"
    return None


def new_powers(groups: Sequence[Group], updates: int, faults: Faults) -> Iterator[tuple[str, Tensor]]:
    """Yields the powers of a run that had none; adds to `faults` what they can't be made of."""
    for name, beta in POWERS.items():
        values = {group.hyperparameters.get(beta) for group in groups}
        (value,) = values if len(values) == 1 else (None,)
        if isinstance(value, (int, float)):
            yield name, in_memory(np.asarray(power_after(value, updates)), name)
        else:
            why = "differs between groups" if len(values) > 1 else "isn't known"
            faults.add(f"{beta} {why}, of which {name} is made: name it (--hparams {beta}=...)", beta)
