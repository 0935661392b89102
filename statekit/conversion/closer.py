"""A closer look: one parameter with its slots, a region of one of them, over a run's steps, or in two checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.checkpoints_at import CheckpointAt, checkpoints_at
from statekit.conversion.contracts import NO_HINTS
from statekit.conversion.open_state import open_state
from statekit.errors import NotFoundError, some
from statekit.state.train_state import TrainState
from statekit.statistics import pictures
from statekit.statistics.change import FIGURES, change
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
    hints: CheckpointRef = NO_HINTS,
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


def region(
    path: str | PathLike[str],
    name: str,
    slot: str | None,
    within: Sequence[int],
    *,
    container: str | None = None,
    layout: str | None = None,
    step: int | None = None,
    hints: CheckpointRef = NO_HINTS,
    on_read: OnRead = lambda size: None,
) -> dict[str, Any]:
    """Returns what a region of a parameter or of one of its slots looks like, as closely as a picture can be.

    Args:
        path: A checkpoint of any system, or a run's folder.
        name: The parameter's canonical path.
        slot: One of its slots; the parameter itself if None.
        within: Its first row and the one behind its last, and the same of its columns, which are the last axis.
        container: Name of the container; found by the content if None.
        layout: Name of the layout; found by the names if None.
        step: A step of a run's folder; the newest if None.
        hints: What the checkpoint doesn't say.
        on_read: Told the bytes of each block that was read.

    Returns:
        `path`, `slot`; `shape`, the rows and columns of all of it; `region`, which are shown; `stats` and `tiles` or
        `bars` of these (`statekit.statistics.pictures.region`).

    Raises:
        NotFoundError: Nothing is there, or no such parameter, slot, row or column.
        FormatError, StateError: It can't be read, or has no canonical form.
    """
    top, bottom, left, right = within
    with open_state(Path(path), container=container, layout=layout, step=step, hints=hints) as opened:
        tensor = _tensor(opened.state, path, name, slot)
        seen = pictures.region(tensor, (top, bottom), (left, right), on_read)
    shape = list(pictures.shape_of_matrix(tensor.shape))
    made = {"path": name, "slot": slot, "shape": shape, "region": [top, bottom, left, right], **seen}
    return dict(to_json(made))


def over_steps(
    *paths: str | PathLike[str],
    name: str,
    hints: CheckpointRef = NO_HINTS,
    on_step: Callable[[int, int], object] = lambda done, all_: None,
) -> dict[str, Any]:
    """Returns the numbers of one parameter over the steps of a run.

    Args:
        *paths: Checkpoints of the run, or its folder.
        name: The parameter's canonical path.
        hints: What the checkpoints don't say.
        on_step: Told how many steps were read, of how many.

    Returns:
        `path`; `updates`, those done at each step; `curves`, the numbers of each by their name; `changes`, by `values`
        and the slots' names, how far each is from the step before (`statekit.statistics.change`), None at the first;
        `guide`, where the update over the parameter lies in healthy runs, by a rule of thumb; `unsaid`, why some aren't
        there, once each.

    Raises:
        NotFoundError: Nothing is there, or no such parameter in one of the steps.
        FormatError, StateError: A step can't be read, or has no canonical form.
    """
    places = [place for path in paths for place in checkpoints_at(Path(path), None, None, hints)]
    seen = []
    for i, place in enumerate(places):
        on_step(i, 2 * len(places))
        record = parameter(place.path, name, container=place.container.name, step=place.step, hints=hints)
        seen.append((record, place))
    seen.sort(key=lambda pair: pair[0]["updates"])
    records, places = [record for record, _ in seen], [place for _, place in seen]
    changes: dict[str, dict[str, list[float | None]]] = {
        slot: {figure: [None] * len(places) for figure in FIGURES}
        for record in records
        for slot in record["tensors"]
    }
    for i, (earlier, later) in enumerate(pairwise(places), start=1):
        on_step(len(places) + i, 2 * len(places))
        for slot, figures in _changed(earlier, later, name, hints).items():
            for figure, value in figures.items():
                changes[slot][figure][i] = value
    numbers = [at_step(record) for record in records]
    names = list(dict.fromkeys(key for one in numbers for key in one))
    unsaid = [said for record in records for said in record["unsaid"]]
    for one, record in zip(numbers, records, strict=True):
        for key, value in one.items():
            if isinstance(value, Mapping):  # as JSON has what isn't finite
                one[key] = None
                unsaid.append(f"{key} is no finite number after {record['updates']} updates.")
    made = {
        "path": name,
        "updates": [record["updates"] for record in records],
        "curves": {key: [one.get(key) for one in numbers] for key in names},
        "changes": changes,
        "guide": GUIDE,
        "unsaid": list(dict.fromkeys(unsaid)),
    }
    return dict(to_json(made))


def _changed(
    earlier: CheckpointAt, later: CheckpointAt, name: str, hints: CheckpointRef
) -> dict[str, dict[str, float | None]]:
    """Returns how far a parameter and each of its slots are from the step before, where that has them so shaped."""
    with (
        open_state(earlier.path, container=earlier.container.name, step=earlier.step, hints=hints) as one,
        open_state(later.path, container=later.container.name, step=later.step, hints=hints) as other,
    ):
        before, after = (
            {"values": opened.state.params[name], **opened.state.slots.get(name, {})}
            for opened in (one, other)
        )
        return {
            slot: change(before[slot], tensor)
            for slot, tensor in after.items()
            if slot in before and before[slot].shape == tensor.shape
        }


def difference(
    left: str | PathLike[str],
    right: str | PathLike[str],
    name: str,
    slot: str | None = None,
    *,
    step: int | None = None,
    hints: CheckpointRef | tuple[CheckpointRef, CheckpointRef] = NO_HINTS,
) -> dict[str, Any]:
    """Returns where one parameter, or one of its slots, of a checkpoint isn't that of another.

    Returns:
        `path`, `slot`, `shape`; `stats` of the magnitudes of `left - right` in float64, with their histogram; `tiles`
        or `bars` of these.

    Raises:
        NotFoundError: One of them lacks it.
        StateError: It has another shape there.
    """
    each = (hints, hints) if isinstance(hints, CheckpointRef) else hints
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
