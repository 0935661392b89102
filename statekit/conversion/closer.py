"""A closer look: one parameter with its slots, over a run's steps, or in two checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from statekit.conversion.checkpoints_at import checkpoints_at
from statekit.conversion.contracts import NO_HINTS, Hints
from statekit.conversion.open_state import open_state
from statekit.errors import NotFoundError, some
from statekit.state.train_state import TrainState
from statekit.statistics.parameter import GUIDE, at_step, parameter_statistics
from statekit.statistics.pictures import Grid
from statekit.tensors.stats import measure
from statekit.tensors.tensor import Tensor, blocks, in_memory
from statekit.tensors.tree import to_json

OnRead = Callable[[int], object]


def parameter(
    path: str | PathLike[str],
    name: str,
    *,
    container: str | None = None,
    layout: str | None = None,
    step: int | None = None,
    hints: Hints = NO_HINTS,
    on_read: OnRead = lambda size: None,
) -> dict[str, Any]:
    """Returns what there is to see of one parameter and its slots, as `statekit.statistics.parameter` has it.

    Args:
        path: A checkpoint of any system, or a run's folder.
        name: The parameter's canonical path.
        container: Name of the container; found by the content if None.
        layout: Name of the layout; found by the names if None.
        step: A step of a run's folder; the newest if None.
        hints: What the checkpoint doesn't say; its budget bounds what the figures of the update take.
        on_read: Told the bytes of each block that was read.

    Raises:
        NotFoundError: Nothing is there, or no such parameter.
        FormatError, StateError: It can't be read, or has no canonical form.
    """
    with open_state(Path(path), container=container, layout=layout, step=step, hints=hints) as opened:
        return parameter_statistics(opened.state, name, hints.job_budget().limits.held, on_read)


def over_steps(
    *paths: str | PathLike[str],
    name: str,
    hints: Hints = NO_HINTS,
    on_step: Callable[[int, int], object] = lambda done, all_: None,
) -> dict[str, Any]:
    """Returns the numbers of one parameter over the steps of a run.

    Args:
        *paths: Checkpoints of the run, or its folder.
        name: The parameter's canonical path.
        hints: What the checkpoints don't say.
        on_step: Told how many steps were read, of how many.

    Returns:
        `path`; `updates`, those done at each step; `curves`, the numbers of each by their name; `guide`, where
        the update over the parameter lies in healthy runs, by a rule of thumb; `unsaid`, why some
        aren't there, once each.

    Raises:
        NotFoundError: Nothing is there, or no such parameter in one of the steps.
        FormatError, StateError: A step can't be read, or has no canonical form.
    """
    places = [place for path in paths for place in checkpoints_at(Path(path), None, None, hints)]
    records = []
    for i, place in enumerate(places):
        on_step(i, len(places))
        records.append(
            parameter(place.path, name, container=place.container.name, step=place.step, hints=hints)
        )
    records.sort(key=lambda one: one["updates"])
    numbers = [at_step(record) for record in records]
    names = list(dict.fromkeys(key for one in numbers for key in one))
    made = {
        "path": name,
        "updates": [record["updates"] for record in records],
        "curves": {key: [one.get(key) for one in numbers] for key in names},
        "guide": GUIDE,
        "unsaid": list(dict.fromkeys(said for record in records for said in record["unsaid"])),
    }
    return dict(to_json(made))


def difference(
    left: str | PathLike[str],
    right: str | PathLike[str],
    name: str,
    slot: str | None = None,
    *,
    step: int | None = None,
    hints: Hints | tuple[Hints, Hints] = NO_HINTS,
) -> dict[str, Any]:
    """Returns where one parameter, or one of its slots, of a checkpoint isn't that of another.

    Returns:
        `path`, `slot`, `shape`; `stats` of the magnitudes of `left - right` in float64, with their histogram; `tiles`
        or `bars` of these.

    Raises:
        NotFoundError: One of them lacks it.
        StateError: It has another shape there.
    """
    each = (hints, hints) if isinstance(hints, Hints) else hints
    with (
        open_state(Path(left), step=step, hints=each[0]) as one,
        open_state(Path(right), step=step, hints=each[1]) as other,
    ):
        a, b = _tensor(one.state, left, name, slot), _tensor(other.state, right, name, slot)
        if a.shape != b.shape:
            raise NotFoundError(
                "It has another shape there.",
                place=f"{right}: {name}",
                expected=list(a.shape),
                found=list(b.shape),
            )
        grid, stats = Grid(a.shape), measure(in_memory(np.zeros(0)))
        for index in blocks(a):
            with np.errstate(invalid="ignore"):
                apart = np.abs(np.asarray(a.read(index), np.float64) - np.asarray(b.read(index), np.float64))
            stats += measure(in_memory(apart))
            grid.take(apart)
    made = {"path": name, "slot": slot, "shape": list(a.shape), "stats": stats.to_json(), **grid.done()}
    return dict(to_json(made))


def _tensor(state: TrainState, where: str | PathLike[str], name: str, slot: str | None) -> Tensor:
    tensors: Mapping[str, Tensor] = state.params if slot is None else state.slots.get(name, {})
    key = name if slot is None else slot
    if key not in tensors:
        raise NotFoundError(
            "It isn't there.", place=str(where), expected=f"{name} {slot or ''}", found=some(list(tensors))
        )
    return tensors[key]
