"""doctor: silent faults that files show by themselves: checkpoints that load, and go on wrong."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from typing import Any

from statekit.attestation.attestation import Finding
from statekit.attestation.faults import FILE_FAULTS, FORMER_NAMES, fault
from statekit.attestation.one_step import narrow_counts, odd, of_one_step
from statekit.attestation.reading import OnTensor, readings
from statekit.attestation.two_steps import Step, are_of_one_run, between_steps
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.conversion.checkpoints_at import CheckpointAt, checkpoints_at
from statekit.conversion.contracts import NO_HINTS
from statekit.conversion.open_state import OpenState, open_state
from statekit.errors import (
    FormatError,
    NamesError,
    NotFoundError,
    RefusedError,
    StateError,
    StatekitError,
    UnknownFormatError,
    UsageError,
    meant,
    printable,
)
from statekit.files.tree import Place
from statekit.state.factoring import PLACEHOLDER
from statekit.state.schema import WEIGHTS
from statekit.tensors.stats import measure
from statekit.tensors.tensor import nbytes

_ONCE = frozenset({"slot-missing"})
"""Faults that a checkpoint shows by itself, and beside the step before once more."""
_SAME_BITS = frozenset({"moments-stale", "weights-stale", "tensors-stale"})
"""Faults that prove by themselves that two files are of one run: names alone may number seeds."""


@dataclass(frozen=True, repr=False)
class Examination:
    """What a checkpoint's files show of its state.

    Attributes:
        path: The checkpoint.
        updates: Updates done; None where the files make no state, or count none.
        findings: Its faults.
        notes: What is odd and may be right, what can't be told, and what was to be ignored, a sentence each.
        bytes_read: Bytes of values that were read, each once.
    """

    path: Place
    updates: int | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    bytes_read: int = 0

    @property
    def passed(self) -> bool:
        """Whether the examination has no findings."""
        return not self.findings

    def __repr__(self) -> str:
        return printable(f"<Examination of {self.path}: {len(self.findings)} findings>")

    def to_json(self) -> dict[str, Any]:
        """Returns the examination as plain data."""
        findings = [finding.to_json() for finding in self.findings]
        return {**vars(self), "path": str(self.path), "findings": findings, "notes": list(self.notes)}


def doctor(
    *sources: CheckpointRef | str | PathLike[str],
    container: str | None = None,
    step: int | None = None,
    hints: CheckpointRef = NO_HINTS,
    ignore: Collection[str] = (),
    on_tensor: OnTensor = lambda name, size: None,
) -> tuple[Examination, ...]:
    """Looks for silent faults in checkpoints, and between those that are steps of one run.

    Reads every value once, block by block. Steps of one run are those of the same parameters and the same optimizer:
    each is held against the one before it, by the updates done.

    Args:
        *sources: Checkpoints, runs' folders, or folders of files that are checkpoints.
        container: Name of the container; found by the content if None.
        step: A step of a run's folder; all of them if None.
        hints: What the checkpoints don't say.
        ignore: Names of findings that are meant to be so: they become notes.
        on_tensor: Told the name and the size in bytes of each tensor before it is read.

    Raises:
        NotFoundError: Nothing is there.
        UnknownFormatError: No container or no layout fits.
        StateError: A checkpoint leaves something open that only hints tell.
        UsageError: There is no finding of a name that is to be ignored.
    """
    ignored = _faults_of(ignore)
    refs = [ref_of(source, hints, container=container, step=step) for source in sources]
    places = [place for ref in refs for place in checkpoints_at(ref)]
    is_step_asked = any(ref.step is not None for ref in refs)
    examinations = list[Examination]()
    are_named = _numbers_in_names(places) is not None
    with ExitStack() as stack:
        before: tuple[Step, ExitStack, int | None] | None = None
        for place in _by_updates(places):
            inner = stack.enter_context(ExitStack())
            try:
                opened = inner.enter_context(open_state(place.ref))
            except NamesError as error:
                examinations.append(_of_no_names(place, error, on_tensor))
                continue
            except UnknownFormatError as error:
                examinations.append(_of_unknown(place, error, on_tensor))
                continue
            except (StateError, FormatError, NotFoundError) as error:
                if is_step_asked and isinstance(error, NotFoundError):
                    raise
                examinations.append(Examination(place.path, None, _of_no_state(place, error), ()))
                continue
            now = Step(opened.state, readings(opened.state, on_tensor))
            findings = list(of_one_step(opened, now.read))
            if before is not None:
                earlier, files, number = before
                is_later = place.step is not None or _follows(earlier, now, number, _number(opened))
                findings += _since(earlier, now, findings, is_later, are_named)
                files.close()
            before = now, inner, _number(opened)
            examinations.append(_examined(opened, findings, now, ignored))
    return tuple(examinations)


def _faults_of(names: Collection[str]) -> frozenset[str]:
    """Returns the faults that names mean, of this version or the one before."""
    faults = frozenset(FORMER_NAMES.get(name, name) for name in names)
    for name in sorted(faults - {*FILE_FAULTS}):
        raise UsageError(
            "No finding has that name.",
            expected=", ".join(FILE_FAULTS),
            found=name,
            remedy=meant(name, FILE_FAULTS),
        )
    return faults


def _since(
    earlier: Step, now: Step, findings: Sequence[Finding], is_later: bool, are_named: bool
) -> Iterator[Finding]:
    """Yields the faults between two checkpoints: of later steps all, by names alone those that need no proof."""
    if is_later or are_named:
        between = _between(earlier, now, findings)
        yield from (finding for finding in between if is_later or finding.name in _SAME_BITS)


def _between(earlier: Step, now: Step, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Returns the faults between two steps, if of one run, that the later step's findings don't tell already."""
    if not are_of_one_run(earlier.state, now.state):
        return ()
    told_once = {finding.name for finding in findings} & _ONCE
    return tuple(finding for finding in between_steps(earlier, now) if finding.name not in told_once)


def _examined(
    opened: OpenState, findings: Sequence[Finding], now: Step, ignore: Collection[str]
) -> Examination:
    kept = tuple(finding for finding in findings if finding.name not in ignore)
    ignored = [
        f"ignored: {finding.name}: {finding.subject}" for finding in findings if finding.name in ignore
    ]
    notes = (*odd(opened, now.read), *ignored)
    is_counted = opened.state.optimizer.schema != WEIGHTS or opened.checkpoint.step is not None
    updates = opened.state.counts.done if is_counted else None
    return Examination(opened.checkpoint.path, updates, kept, notes, now.read.bytes_read)


def _by_updates(places: Sequence[CheckpointAt]) -> Iterator[CheckpointAt]:
    """Yields checkpoints in the order of a run: of a run's folder that of its steps, of files that of their updates."""
    if len(places) < 2 or all(place.step is not None for place in places):
        yield from places
        return
    if (numbers := _numbers_in_names(places)) is not None:
        yield from (place for _, place in sorted(zip(numbers, places, strict=True), key=lambda pair: pair[0]))
        return
    counted: list[tuple[tuple[int, int], CheckpointAt]] = []
    for place in places:
        try:
            with open_state(place.ref) as opened:
                counted.append(((opened.state.counts.updates, _number(opened) or 0), place))
        except (StateError, FormatError, NotFoundError):  # which is said when its turn comes
            counted.append(((0, 0), place))
    yield from (place for _, place in sorted(counted, key=lambda pair: pair[0]))


_LAST_NUMBER = re.compile(r"(.*?)(\d{1,18})(\.[A-Za-z]\w*)?", re.DOTALL)
"""The name of one of a run's steps: what all of them begin with, its number, and a suffix."""


def _numbers_in_names(places: Sequence[CheckpointAt]) -> list[int] | None:
    """Returns the numbers in the names of checkpoints in one folder that are named alike; None if they aren't.

    However the steps of a folder are named on the command line, they are the folder's steps: one order.
    """
    paths = [place.ref.place for place in places]
    if len({path.name for path in paths}) == 1:  # a file of one name in a folder for each step
        paths = [path.parent for path in paths]
    names = [_LAST_NUMBER.fullmatch(path.name) for path in paths]
    stems = {(path.parent, name[1], name[3]) for path, name in zip(paths, names, strict=True) if name}
    numbers = [int(name[2]) for name in names if name]
    is_whole = len(numbers) == len(places) == len({*numbers}) and len(stems) == 1
    return numbers if is_whole else None


def _number(opened: OpenState) -> int | None:
    """Returns the step that a checkpoint's own name or files count, which a saver of stale values counts on."""
    return opened.checkpoint.step if opened.checkpoint.is_numbered else None


def _follows(earlier: Step, now: Step, before: int | None, number: int | None) -> bool:
    """Tells whether a checkpoint is a later step: by its own number, or if it has done more updates."""
    if before is not None and number is not None and before != number:
        return number > before
    return now.state.counts.updates > earlier.state.counts.updates


def _of_no_names(place: CheckpointAt, error: NamesError, on_tensor: OnTensor) -> Examination:
    """Examines a checkpoint whose optimizer numbers its parameters, if nothing tells their names."""
    with place.opened() as checkpoint:
        contents = registry.contents(checkpoint)
        if contents is None or contents.unnamed is None:
            return _of_unknown(place, error, on_tensor)
        counts = tuple(narrow_counts(checkpoint.tensors))
        lacking = f"not looked at: the slots, as nothing tells whose they are; {error.remedy}"
        return Examination(checkpoint.path, contents.unnamed.counts.done, counts, (lacking,))


def _of_unknown(
    place: CheckpointAt, error: UnknownFormatError | NamesError, on_tensor: OnTensor
) -> Examination:
    """Returns what is told of a checkpoint whose optimizer no schema has: whether its values are finite."""
    with place.opened(place.ref.job_budget()) as checkpoint:
        contents = registry.contents(checkpoint)
        if contents is None or not contents.params:
            raise error
        broken, size = [], 0
        for name, tensor in checkpoint.tensors.items():
            on_tensor(name, nbytes(tensor))
            size += nbytes(tensor)
            stats = measure(tensor)
            broken += [name] if stats.nans or stats.infs else []
        findings = [fault("not-finite", broken, "finite values", "NaN or infinite ones")] if broken else []
        findings += narrow_counts(checkpoint.tensors)
        lacking = f"healthy as far as statekit knows it: {contents.what}; values alone were looked at"
        return Examination(checkpoint.path, None, tuple(findings), (lacking,), size)


def _of_no_state(place: CheckpointAt, error: StatekitError) -> tuple[Finding, ...]:
    """Returns why a checkpoint makes no state: damage, or values that no optimizer would save."""
    if "--" in error.remedy or isinstance(
        error, RefusedError
    ):  # an option is the remedy, or nothing may be read
        raise error
    if isinstance(error, UnknownFormatError):
        if counts := _narrow_counts_at(place):
            return counts
        raise error
    if isinstance(error, NotFoundError):
        return (_of_error("parts-missing", place, error, "what was written"),)
    if isinstance(error, FormatError):
        return (_of_error("damaged", place, error, "what was written"),)
    is_placeholder = any(str(PLACEHOLDER) in sentence for sentence, _ in error.faults)
    name = "placeholders" if is_placeholder else "undecodable"
    return _narrow_counts_at(place) or (_of_error(name, place, error, "what the optimizer would save"),)


def _narrow_counts_at(place: CheckpointAt) -> tuple[Finding, ...]:
    """Returns which counts of a checkpoint's tensors are of a dtype too narrow for them."""
    with place.opened() as checkpoint:
        return tuple(narrow_counts(checkpoint.tensors))


def _of_error(name: str, place: CheckpointAt, error: StatekitError, expected: str) -> Finding:
    """Returns the finding that an error is."""
    where = [at for _, at in error.faults] or [str(error.place or place.path)]
    details = "; ".join(dict.fromkeys(sentence for sentence, _ in error.faults)) or error.found
    sentence = f"{error.subject} {details}" if details else error.subject
    return fault(name, where, error.expected or expected, sentence)
