"""Which parameters of a run are stepped, and which part of a large one: drawn with a seed, and stated.

Identity, map and rules are of every tensor; only updates may be sampled. Of each kind of parameter (shape, dtype,
factor rule, slots, group) one is taken, and of a large one a window: the same rows and columns of the parameter and of
its slots, which is a smaller parameter of the same run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from statekit.errors import UsageError
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Index, Shape, Tensor, in_memory

WINDOW = 2**14
"""Elements of a parameter that are stepped of a large one."""


@dataclass(frozen=True)
class Sample:
    """What is stepped.

    Attributes:
        paths: The parameters, in the state's order.
        windows: Of those of which a part is stepped, which: `[(start, stop), ...]` for each axis.
        stands_for: Parameter -> the one that is stepped in its place, of the same kind.
        seed: What it was drawn with.
    """

    paths: tuple[str, ...]
    windows: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    stands_for: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether every element of every parameter is stepped."""
        return not self.windows and not self.stands_for

    def of(self, state: TrainState) -> TrainState:
        """Returns a state of what is stepped, in memory; slots of a group as a whole stay."""
        some = state.only(self.paths)
        cut = {path: tuple(slice(*ends) for ends in window) for path, window in self.windows.items()}
        groups = tuple(
            replace(group, slots={name: in_memory(slot.read(), name) for name, slot in group.slots.items()})
            for group in some.optimizer.groups
        )
        return replace(
            some,
            params={path: _part(tensor, cut.get(path)) for path, tensor in some.params.items()},
            slots={
                path: {
                    name: _part(slot, _index_of_slot(some, path, name, cut.get(path)))
                    for name, slot in slots.items()
                }
                for path, slots in some.slots.items()
            },
            optimizer=replace(some.optimizer, groups=groups),
            extra={},
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the sample as plain data."""
        return {
            "seed": self.seed,
            "stepped": list(self.paths),
            "windows": {path: [list(ends) for ends in window] for path, window in self.windows.items()},
            "stands_for": dict(self.stands_for),
        }


def sampled(state: TrainState, seed: int = 0, everything: bool = False) -> Sample:
    """Draws what is stepped of a state.

    Args:
        state: The state.
        seed: Of the draw.
        everything: Whether to take every element of every parameter.

    Raises:
        UsageError: The seed is below 0.
    """
    if seed < 0:
        raise UsageError("A seed is a number from 0.", place="--seed", found=seed)
    moved = state.optimizer.group_numbers
    paths = [path for path in state.params if path in moved and 0 not in state.params[path].shape]
    if everything:
        return Sample(tuple(paths), seed=seed)
    kinds: dict[Any, list[str]] = {}
    for path in paths:
        kinds.setdefault(_kind(state, path, moved[path]), []).append(path)
    rng = np.random.default_rng(seed)
    drawn = {same[int(rng.integers(len(same)))]: same for same in kinds.values()}
    order = tuple(path for path in paths if path in drawn)
    windows = {
        path: window for path in order if (window := _window(state.params[path].shape, rng)) is not None
    }
    stands = {other: path for path, same in drawn.items() for other in same if other != path}
    return Sample(order, windows, stands, seed)


def _kind(state: TrainState, path: str, group: int) -> Any:
    rule, param = state.rules.get(path), state.params[path]
    slots = tuple((name, slot.dtype.name) for name, slot in sorted(state.slots.get(path, {}).items()))
    behind = state.counts.behind.get(path)
    return param.shape, param.dtype.name, rule and rule.axes, slots, group, behind


def _window(shape: Shape, rng: np.random.Generator) -> tuple[tuple[int, int], ...] | None:
    """Returns a part of a shape that has few elements; None if it has few anyway."""
    sides = list(shape)
    while math.prod(sides) > WINDOW:
        longest = sides.index(max(sides))
        sides[longest] = 1 << (sides[longest] - 1).bit_length() - 1  # the power of two below
    if sides == list(shape):
        return None
    starts = [int(rng.integers(whole - side + 1)) for whole, side in zip(shape, sides, strict=True)]
    return tuple((start, start + side) for start, side in zip(starts, sides, strict=True))


def _index_of_slot(state: TrainState, path: str, name: str, index: Index | None) -> Index | None:
    """Returns the part of a slot that belongs to a part of its parameter; None where it is of the whole."""
    if index is None:
        return None
    group = state.group_of(path)
    assert group is not None
    kind = load_schema(state.optimizer.kind(group)[0]).slots[name].shape
    if kind == "parameter":
        return index
    if kind in ("row", "column"):
        return tuple(index[i] for i in state.rules[path].kept(name))
    return None


def _part(tensor: Tensor, index: Index | None) -> Tensor:
    return in_memory(np.array(tensor.read(index)), str(tensor.to_json().get("name", "")))
