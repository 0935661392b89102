"""The attributes of MXNet's optimizers, as they are pickled: hyperparameters, counts, and what else they hold.

Counts stand by device id and index. `_index_update_count` is one of these dicts, of the device that was used last; the
other devices count the same updates.
Source: apache/mxnet, python/mxnet/optimizer/optimizer.py, `Optimizer.__init__`, `_set_current_device`, `_update_count`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statekit.errors import StateError

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


def read_counts(attributes: Mapping[str, Any]) -> Counted:
    """Takes the counts of a pickled optimizer apart.

    Raises:
        StateError: They aren't counts.
    """
    current = attributes.get(CURRENT, {})
    every = attributes.get(BY_DEVICE, {0: current})
    if not isinstance(every, dict) or not all(map(_is_counts, (current, *every.values()))):
        raise StateError("The counts of updates aren't index -> number.", place=BY_DEVICE)
    counts: Mapping[Any, int] = next((held for held in every.values() if held), {})
    same = [device for device, held in every.items() if held is current]
    equal = [device for device, held in every.items() if held == current]
    return Counted(
        counts,
        tuple(every),
        next(iter((*same, *equal)), 0),
        {device: held for device, held in every.items() if held != counts},
    )


def written_counts(counted: Counted) -> dict[str, Any]:
    """Returns the two attributes that hold counts; undoes `read_counts`."""
    every = {device: dict(counted.apart.get(device, counted.counts)) for device in counted.devices}
    return {BY_DEVICE: every, CURRENT: every.setdefault(counted.current, {})}


def _is_counts(held: Any) -> bool:
    return isinstance(held, dict) and all(type(n) is int and 0 <= n < 2**62 for n in held.values())
