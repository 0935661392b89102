"""A closer look: one parameter with its slots, a region of one of them, over a run's steps, or in two checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from os import PathLike
from typing import Any

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.conversion.checkpoints_at import checkpoints_at
from statekit.conversion.open_state import OpenState, open_state
from statekit.errors import NotFoundError, some
from statekit.statistics import pictures
from statekit.statistics.change import FIGURES, change
from statekit.statistics.parameter import GUIDE, at_step, parameter_statistics
from statekit.statistics.pictures import Grid
from statekit.tensors.stats import measure
from statekit.tensors.tensor import Tensor, blocks, in_memory
from statekit.tensors.tree import to_json

OnRead = Callable[[int], object]


def parameter(
    source: CheckpointRef | str | PathLike[str], name: str, *, on_read: OnRead = lambda size: None
) -> dict[str, Any]:
    """Returns the statistics of one parameter and its slots (`statekit.statistics.parameter`).

    Args:
        source: A checkpoint of any system, or a run's folder; a ref of one says what its files don't.
        name: The parameter's canonical path.
        on_read: Told the bytes of each block that was read.

    Raises:
        NotFoundError: Nothing is there, or no such parameter.
        FormatError, StateError: It can't be read, or has no canonical form.
    """
    ref = ref_of(source)
    with open_state(ref) as opened:
        return parameter_statistics(opened.state, name, ref.job_budget().limits.held, on_read)


def region(
    source: CheckpointRef | str | PathLike[str],
    name: str,
    slot: str | None,
    within: Sequence[int],
    *,
    on_read: OnRead = lambda size: None,
) -> dict[str, Any]:
    """Returns the picture of a region of a parameter, or of one of its slots.

    Args:
        source: A checkpoint of any system, or a run's folder; a ref of one says what its files don't.
        name: The parameter's canonical path.
        slot: One of its slots; the parameter itself if None.
        within: Its first row and the one behind its last, and the same of its columns, which are the last axis.
        on_read: Told the bytes of each block that was read.

    Returns:
        `path`, `slot`; `shape`, the rows and columns of all of it; `region`, which are shown; `stats` and `tiles` or
        `bars` of these (`statekit.statistics.pictures.region`).

    Raises:
        NotFoundError: Nothing is there, or no such parameter, slot, row or column.
        FormatError, StateError: It can't be read, or has no canonical form.
    """
    top, bottom, left, right = within
    with open_state(ref_of(source)) as opened:
        tensor = _tensor(opened, name, slot)
        seen = pictures.region(tensor, (top, bottom), (left, right), on_read)
    shape = list(pictures.shape_of_matrix(tensor.shape))
    view = {"path": name, "slot": slot, "shape": shape, "region": [top, bottom, left, right], **seen}
    return dict(to_json(view))


def over_steps(
    *sources: CheckpointRef | str | PathLike[str],
    name: str,
    on_step: Callable[[int, int], object] = lambda done, all_: None,
) -> dict[str, Any]:
    """Returns the numbers of one parameter over the steps of a run.

    Args:
        *sources: Checkpoints of the run, or its folder.
        name: The parameter's canonical path.
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
    steps = [place.ref for source in sources for place in checkpoints_at(ref_of(source))]
    seen = []
    for i, ref in enumerate(steps):
        on_step(i, 2 * len(steps))
        seen.append((parameter(ref, name), ref))
    seen.sort(key=lambda pair: pair[0]["updates"])
    records, steps = [record for record, _ in seen], [ref for _, ref in seen]
    slots = dict.fromkeys(slot for record in records for slot in record["tensors"])
    nothing = dict.fromkeys(FIGURES)
    apart: list[dict[str, Any]] = [{}]
    for i, (earlier, later) in enumerate(pairwise(steps), start=1):
        on_step(len(steps) + i, 2 * len(steps))
        apart.append(_changed(earlier, later, name))
    curves, infinite = _curves(records)
    unsaid = [*(reason for record in records for reason in record["unsaid"]), *infinite]
    view = {
        "path": name,
        "updates": [record["updates"] for record in records],
        "curves": curves,
        "changes": {
            slot: {
                figure: [figures_at.get(slot, nothing)[figure] for figures_at in apart] for figure in FIGURES
            }
            for slot in slots
        },
        "guide": GUIDE,
        "unsaid": list(dict.fromkeys(unsaid)),
    }
    return dict(to_json(view))


def _curves(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Any]], list[str]]:
    """Returns the numbers of a parameter over its records, by their name, and which of them are not finite."""
    numbers, infinite = [at_step(record) for record in records], []
    for number, record in zip(numbers, records, strict=True):
        for key, value in number.items():
            if isinstance(value, Mapping):  # as JSON has what isn't finite
                number[key] = None
                infinite.append(f"{key} is no finite number after {record['updates']} updates.")
    names = dict.fromkeys(key for number in numbers for key in number)
    return {key: [number.get(key) for number in numbers] for key in names}, infinite


def _changed(earlier: CheckpointRef, later: CheckpointRef, name: str) -> dict[str, dict[str, float | None]]:
    """Returns how far a parameter and each of its slots are from the step before, where that has them so shaped."""
    with open_state(earlier) as first, open_state(later) as other:
        before, after = (
            {"values": opened.state.params[name], **opened.state.slots.get(name, {})}
            for opened in (first, other)
        )
        return {
            slot: change(before[slot], tensor)
            for slot, tensor in after.items()
            if slot in before and before[slot].shape == tensor.shape
        }


def difference(
    left: CheckpointRef | str | PathLike[str],
    right: CheckpointRef | str | PathLike[str],
    name: str,
    slot: str | None = None,
) -> dict[str, Any]:
    """Returns the differences of one parameter, or one of its slots, between two checkpoints.

    Returns:
        `path`, `slot`, `shape`; `stats` of the magnitudes of `left - right` in float64, with their histogram; `tiles`
        or `bars` of these.

    Raises:
        NotFoundError: One of them lacks it.
        StateError: It has another shape there.
    """
    with open_state(ref_of(left)) as first, open_state(ref_of(right)) as other:
        a, b = _tensor(first, name, slot), _tensor(other, name, slot)
        if a.shape != b.shape:
            raise NotFoundError(
                "It has another shape there.",
                place=f"{other.checkpoint.path}: {name}",
                expected=list(a.shape),
                found=list(b.shape),
            )
        grid, stats = Grid(a.shape), measure(in_memory(np.zeros(0)))
        for index in blocks(a):
            with np.errstate(invalid="ignore"):
                apart = np.abs(np.asarray(a.read(index), np.float64) - np.asarray(b.read(index), np.float64))
            stats += measure(in_memory(apart))
            grid.take(apart)
    view = {"path": name, "slot": slot, "shape": list(a.shape), "stats": stats.to_json(), **grid.done()}
    return dict(to_json(view))


def _tensor(opened: OpenState, name: str, slot: str | None) -> Tensor:
    tensors = opened.params if slot is None else opened.slots.get(name, {})
    key = name if slot is None else slot
    if key not in tensors:
        raise NotFoundError(
            "It isn't there.",
            place=str(opened.checkpoint.path),
            expected=f"{name} {slot or ''}",
            found=some(list(tensors)),
        )
    return tensors[key]
