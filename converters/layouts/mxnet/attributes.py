"""The attributes of MXNet's optimizers, as they are pickled: hyperparameters, counts, and what else they hold.

Counts stand by device id and index. `_index_update_count` is one of these dicts, of the device that was used last; the
other devices count the same updates.
Source: apache/mxnet, python/mxnet/optimizer/optimizer.py, `Optimizer.__init__`, `_set_current_device`, `_update_count`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from statekit.errors import StateError
from statekit.tensors.typed import Name, Natural, fits, misfits, shown, typed

BY_DEVICE, CURRENT = "_all_index_update_counts", "_index_update_count"
BASE: Mapping[str, Any] = {
    "rescale_grad": 1.0, "lr_scheduler": None, "lr": None, "wd": 0.0, "lr_mult": {}, "wd_mult": {},
    "begin_num_update": 0, "num_update": 0, BY_DEVICE: {}, CURRENT: {}, "clip_gradient": None,
    "multi_precision": False, "aggregate_num": 1, "idx2name": {}, "sym_info": (), "allow_np_array": True,
    "use_fused_step": False,
}  # fmt: skip
"""What every optimizer has, in its order, with what stands there unless something else is said.

Without a learning rate, MXNet steps only after `set_learning_rate`.
"""
ARGUMENTS = {"lr": "learning_rate"}
"""Attributes that are called otherwise than the constructor's arguments."""
MULTIPLIERS = ("lr_mult", "wd_mult")


class Attributes(TypedDict, total=False):
    """The attributes that say more than a number."""

    begin_num_update: Natural
    num_update: Natural
    lr_mult: dict[int | Name, bool | float]
    wd_mult: dict[int | Name, bool | float]
    idx2name: dict[int | Name, Name]


class Counts(TypedDict, total=False):
    """The attributes that count: by device id and index, and those of one device."""

    _all_index_update_counts: dict[int, dict[int | Name, Natural]]
    _index_update_count: dict[int | Name, Natural]


@dataclass(frozen=True)
class Counted:
    """The counts of an optimizer.

    Attributes:
        counts: Index -> updates, of the first device that has any, in the order of its first update.
        devices: Ids of all devices.
        current: The one whose dict is the current one.
        apart: Counts of devices that don't count the same.
    """

    counts: Mapping[Any, int] = field(default_factory=dict)
    devices: tuple[int, ...] = (0,)
    current: int = 0
    apart: Mapping[int, Mapping[Any, int]] = field(default_factory=dict)


def attribute_faults(attributes: Mapping[str, Any], arguments: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields what no optimizer of MXNet has: a fault, and the attribute.

    Args:
        attributes: Of a pickled optimizer.
        arguments: Arguments of its constructor that are numbers, unless they are multipliers.
    """
    yield from misfits(attributes, Attributes)
    for name, value in attributes.items():
        is_argument = ARGUMENTS.get(name, name) in arguments and name not in MULTIPLIERS
        if is_argument and not fits(value, bool | float | None):
            yield f"is {shown(value)}, expected a number", name


def shared_value(
    values: Mapping[str, float | None], read_factors: Mapping[str, float]
) -> tuple[float | None, dict[str, float]] | None:
    """Returns one value, and by which factors those of single parameters differ from it, exactly.

    Args:
        values: Path -> value.
        read_factors: Path -> factor, where it was read; taken where it still holds.

    Returns:
        The value and the factors that aren't 1; None if there are none that give the values to the last bit.

    Example:
        >>> shared_value({"w": 0.1, "b": 0.0}, {})
        (0.1, {'b': 0.0})
    """
    numbers = {path: value for path, value in values.items() if value is not None}
    if len(numbers) != len(values):
        return None if numbers else (None, {})
    plain = [value for path, value in numbers.items() if path not in read_factors]
    undone = [value / read_factors[path] for path, value in numbers.items() if read_factors.get(path)]
    for base in dict.fromkeys([*plain, *undone, *numbers.values(), 0.0]):
        factors = _factors(base, numbers, read_factors)
        if all(base * factors.get(path, 1.0) == value for path, value in numbers.items()):
            return base, factors
    return None


def _factors(
    base: float, numbers: Mapping[str, float], read_factors: Mapping[str, float]
) -> dict[str, float]:
    """Returns the factor between each parameter's number and `base`; a factor that was read stays if it holds."""
    factors = {path: factor for path, factor in read_factors.items() if path in numbers}
    for path, number in numbers.items():
        if base * factors.get(path, 1.0) != number:
            factors[path] = number / base if base else 1.0
    return factors


def read_counts(attributes: Mapping[str, Any]) -> Counted:
    """Takes the counts of a pickled optimizer apart.

    Raises:
        StateError: They aren't counts.
    """
    typed(attributes, Counts, BY_DEVICE, "The counts of updates aren't index -> number", StateError)
    current = attributes.get(CURRENT, {})
    every = attributes.get(BY_DEVICE, {0: current})
    counts: Mapping[Any, int] = next((of_device for of_device in every.values() if of_device), {})
    same = [device for device, of_device in every.items() if of_device is current]
    equal = [device for device, of_device in every.items() if of_device == current]
    return Counted(
        counts,
        tuple(every),
        next(iter((*same, *equal)), 0),
        {device: of_device for device, of_device in every.items() if of_device != counts},
    )


def written_counts(counted: Counted) -> dict[str, Any]:
    """Returns the two attributes that hold counts; undoes `read_counts`."""
    every = {device: dict(counted.apart.get(device, counted.counts)) for device in counted.devices}
    return {BY_DEVICE: every, CURRENT: every.setdefault(counted.current, {})}
