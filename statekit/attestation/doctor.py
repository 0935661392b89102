"""doctor: silent faults that files show by themselves: checkpoints that load, and go on wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from statekit.attestation.attestation import Finding
from statekit.attestation.diagnosis import fault, stale_masters
from statekit.conversion.checkpoints_at import Place, checkpoints_at
from statekit.conversion.contracts import NO_HINTS, Hints
from statekit.conversion.open_state import OpenState, open_state
from statekit.errors import printable
from statekit.state.comparison import compare_states
from statekit.state.schema import WEIGHTS, load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.digest import tensor_digest
from statekit.tensors.tensor import Tensor, chunks, nbytes

SECOND_MOMENTS = frozenset({"v", "v_row", "v_col", "v_max", "exp_avg_sq", "scale_exp_avg_sq"})
"""Slots that are means of squares, or the largest of such."""
_RATES = ("learning_rate", "lr")


@dataclass(frozen=True, repr=False)
class Examination:
    """What a checkpoint's files show of its state.

    Attributes:
        path: The checkpoint.
        updates: Updates done.
        findings: Its faults.
        notes: What is odd and may be right, a sentence each.
    """

    path: Path
    updates: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __repr__(self) -> str:
        return printable(f"<Examination of {self.path}: {len(self.findings)} findings>")

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data."""
        findings = [one.to_json() for one in self.findings]
        return {**vars(self), "path": str(self.path), "findings": findings, "notes": list(self.notes)}


def doctor(
    path: str | PathLike[str],
    *,
    container: str | None = None,
    step: int | None = None,
    hints: Hints = NO_HINTS,
) -> tuple[Examination, ...]:
    """Looks for silent faults in the checkpoints at a path; of a run's folder in each step, and between steps.

    Reads every value once; of several steps, the slots of each twice.

    Args:
        path: A checkpoint, a run's folder, or a folder of files that are checkpoints.
        container: Name of the container; found by the content if None.
        step: A step of a run's folder; all of them if None.
        hints: What the checkpoints don't say.

    Raises:
        NotFoundError: Nothing is there.
        FormatError, StateError: One of them can't be read, or has no canonical form.
    """
    each, before = list[Examination](), None
    for place in checkpoints_at(Path(path), container, step, hints):
        with _opened(place, hints) as opened:
            findings = [*_of_files(opened), *_of_state(opened.state)]
            if before is not None:
                with _opened(before, hints) as earlier:
                    findings += _between(earlier.state, opened.state)
            updates, notes = opened.state.counts.updates, tuple(_odd(opened.state))
            each.append(Examination(opened.checkpoint.path, updates, tuple(findings), notes))
        before = place if place.step is not None else None
    return tuple(each)


def _opened(place: Place, hints: Hints) -> OpenState:
    return open_state(place.path, container=place.container.name, step=place.step, hints=hints)


def _of_files(opened: OpenState) -> Iterator[Finding]:
    for one in opened.checkpoint.findings:
        yield fault("files", [one.place], "files of one step, whole", one.what)


def _of_state(state: TrainState) -> Iterator[Finding]:
    if state.optimizer.schema == WEIGHTS:
        return
    values = {name: _Values.of(tensor) for name, tensor in _tensors(state)}
    yield from _of_values(state, values)
    yield from _narrow(state)
    yield from stale_masters(state)
    for i, group in enumerate(state.optimizer.groups):
        offset = group.hyperparameters.get("step_offset")
        if isinstance(offset, int) and offset > state.counts.updates:
            yield fault("step-offset", [f"groups/{i}/step_offset"], f"at most {state.counts.updates}", offset)


@dataclass(frozen=True)
class _Values:
    """What is known of a tensor after it was read once."""

    digest: str
    is_zero: bool
    is_finite: bool
    is_negative: bool

    @staticmethod
    def of(tensor: Tensor) -> _Values:
        zero, finite, negative = True, True, False
        for block in chunks(tensor):
            if block.dtype.kind in "fV":
                finite = finite and bool(np.isfinite(block).all())
            negative = negative or (block.dtype.kind != "b" and bool((block < 0).any()))
            zero = zero and not block.any()
        return _Values(tensor_digest(tensor), zero, finite, negative)


def _tensors(state: TrainState) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yields parameters, under their path and "", and slots under path and name."""
    for path, param in state.params.items():
        yield (path, ""), param
        yield from (((path, name), slot) for name, slot in state.slots.get(path, {}).items())


def _of_values(state: TrainState, values: dict[tuple[str, str], _Values]) -> Iterator[Finding]:
    def named(keys: Sequence[tuple[str, str]]) -> list[str]:
        return [f"slots/{path}/{slot}" if slot else f"params/{path}" for path, slot in keys]

    if wrong := [key for key, one in values.items() if not one.is_finite]:
        yield fault("not-finite", named(wrong), "finite values", "NaN or Inf")
    if wrong := [key for key, one in values.items() if key[1] in SECOND_MOMENTS and one.is_negative]:
        yield fault("second-moment-negative", named(wrong), "zero or more", "less than zero")
    for slot in dict.fromkeys(slot for _, slot in values if slot):
        keys = [key for key in values if key[1] == slot]
        if state.counts.updates and all(values[key].is_zero for key in keys):
            yield fault("moments-zero", named(keys), f"values after {state.counts.updates} updates", "zeros")
    by_digest: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for key, one in values.items():
        path, slot = key
        if slot and not one.is_zero and nbytes(state.slots[path][slot]) > _LEAST:
            by_digest.setdefault((slot, one.digest), []).append(key)
    same = [
        key
        for keys in by_digest.values()
        if len({values[path, ""].digest for path, _ in keys}) > 1
        and not _are_added(state, [path for path, _ in keys])
        for key in keys
    ]
    if same:
        yield fault("slots-duplicated", named(same), "its own of each parameter", "the same bits")


def _are_added(state: TrainState, paths: Sequence[str]) -> bool:
    """Tells whether these may be vectors of one module that are added, as an LSTM's biases: their gradients are one."""
    return all(len(state.params[path].shape) == 1 for path in paths) and (
        len({path.rpartition("/")[0] for path in paths}) == 1
    )


_LEAST = 32
"""Bytes: smaller slots may well be equal by chance."""


def _narrow(state: TrainState) -> Iterator[Finding]:
    """Yields floating-point slots that are narrower than their parameters, unless an option asks for that."""
    for group in state.optimizer.groups:
        schema = load_schema(state.optimizer.kind(group)[0])
        asked = {
            slot
            for name, spec in schema.hyperparameters.items()
            if group.hyperparameters.get(name) is not None
            for slot in spec.get("decides", {}).get("dtype", ())
        }
        narrow = [
            (path, name, slot)
            for path in group.paths
            for name, slot in state.slots.get(path, {}).items()
            if slot.dtype.kind in "fV"
            and name not in asked
            and slot.dtype.itemsize < state.params[path].dtype.itemsize
        ]
        if narrow:
            path, _, slot = narrow[0]
            where = [f"slots/{path}/{name}" for path, name, _ in narrow]
            yield fault("slots-narrow", where, state.params[path].dtype.name, slot.dtype.name)


def _odd(state: TrainState) -> Iterator[str]:
    behind = state.counts.behind
    if behind:
        counts = ", ".join(map(str, sorted({*behind.values()})))
        yield (
            f"{len(behind)} of {len(state.params)} parameters have done {counts} updates, the others "
            f"{state.counts.updates}: without a gradient in the others, or their state was lost"
        )


def _between(earlier: TrainState, later: TrainState) -> Iterator[Finding]:
    """Yields what is wrong between two steps of a run."""
    compared = compare_states(earlier, later)
    slots = any(later.slots.get(path) for path in later.params)
    changed = {
        one.what
        for one in compared.differences
        if one.what in ("values", "updates") and (one.path or one.item)
    }
    moved = [one for one in compared.differences if one.what == "values" and one.item]
    if slots and changed and not moved:
        where = [f"slots/{path}" for path in later.slots]
        yield fault("moments-stale", where, "other values than at the step before", "the same bits")
    options: dict[str, list[Any]] = {}
    for one in compared.differences:
        if one.what == "option" and one.item not in _RATES:
            options.setdefault(one.item, []).append(one)
    for item, each in options.items():
        where = [one.place for one in each]
        yield fault(
            "hyperparameter-changed", where, f"{item} {each[0].expected!r}", f"{item} {each[0].actual!r}"
        )
