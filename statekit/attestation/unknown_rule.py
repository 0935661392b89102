"""Whether a live run is its checkpoint's where no schema has the optimizer's rule: its tensors by their own names.

Input: what a layout says of both without making a state of them. Slots mean nothing here: bits, shapes, dtypes and
options must be equal, parameter by parameter. What a rule would tell (an absent slot that stands for zeros, a count)
can't be told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from statekit.attestation.attest import LIVE_ORDER, WIDENED, attesting, sampled, widened
from statekit.attestation.attestation import Attestation, Finding
from statekit.attestation.averaged import in_live_mode
from statekit.attestation.faults import fault
from statekit.attestation.live_run import LiveRun
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.conversion.contracts import Contents
from statekit.dropin.by_name import path_of
from statekit.errors import UnknownFormatError, some
from statekit.files.checkpoint import Checkpoint
from statekit.files.tree import Place
from statekit.state.comparison import is_zero
from statekit.state.evidence import ordered
from statekit.state.param_names import wrapped_names
from statekit.state.schema import is_native
from statekit.tensors.distance import distance
from statekit.tensors.tensor import Tensor, nbytes, parts_of
from statekit.tensors.tree import to_json

_ROWS = ("scheduler", "scaler")
"""Records beside model and optimizer, by the key that a file of PyTorch mostly has for them."""
_RULE = "the update's rule, and what it tells of slots and counts: no schema has the optimizer ({what})"


def attested(
    run: LiveRun,
    path: CheckpointRef | str | PathLike[str],
    sample: int | None,
    seed: int,
    strict: bool = False,
) -> Attestation:
    """Returns whether a live run is that of a checkpoint; where no schema has the optimizer's rule, by names alone.

    Args:
        run: The live run.
        path: Anything statekit reads.
        sample: How many parameters are compared by value, drawn with `seed`; all if None.
        seed: Of the sample.
        strict: Whether to raise what was found.

    Raises:
        StateError: With `strict`, the live run isn't the checkpoint's; others as of `attesting`.
    """
    result = run.gathered(lambda: _of_this_process(run, path, sample, seed))
    if strict:
        result.check()
    return result


def _of_this_process(
    run: LiveRun, path: CheckpointRef | str | PathLike[str], sample: int | None, seed: int
) -> Attestation:
    try:
        with attesting(path, run, sample, seed) as sides:
            attestation, has_rule = sides.result, not any(map(is_native, sides.right.optimizer.schemas))
        return attestation if has_rule else _by_names(run, ref_of(path).place, sample, seed) or attestation
    except UnknownFormatError:
        result = _by_names(run, ref_of(path).place, sample, seed)
        if result is None:
            raise
        return result


def _by_names(run: LiveRun, path: Place, sample: int | None, seed: int) -> Attestation | None:
    """Compares two runs by names alone; returns None if one side doesn't name its tensors' parameters."""
    if run.names or run.maps or run.generators:
        return None
    running, hints = run.checkpoint(), run.hints
    with registry.opened(registry.detect_container(path)[0], path, hints.step, hints) as checkpoint:
        right, note = registry.contents(checkpoint, hints.param_names), ""
        if right is not None and right.params and not right.slots and run.instead:
            order, note = run.instead[0]
            right = registry.contents(checkpoint, order.param_names)
        live = registry.contents(running)
        if right is None or live is None or not right.params or not (right.slots or live.slots):
            return None
        return attest_by_names(
            (checkpoint, right),
            (running, live),
            findings=list(run.findings),
            elsewhere=run.elsewhere,
            assumptions=[note] if note else [],
            sample=sample,
            seed=seed,
        )


def attest_by_names(
    right: tuple[Checkpoint, Contents],
    live: tuple[Checkpoint, Contents],
    *,
    findings: Sequence[Finding] = (),
    elsewhere: Collection[str] = (),
    assumptions: Sequence[str] = (),
    sample: int | None = None,
    seed: int = 0,
) -> Attestation:
    """Compares a live run with a checkpoint by the names that both have.

    Args:
        right: The checkpoint, and what it holds.
        live: The live run in that form.
        findings: What is wrong apart from its state.
        elsewhere: Parameters of which this process has nothing, and others have all.
        assumptions: What was assumed of the checkpoint.
        sample: How many parameters are compared by value, drawn with `seed`; all if None.
        seed: Of the sample.
    """
    (checkpoint, expected), (running, actual) = right, live
    expected = _renamed(expected, wrapped_names([*actual.params], [*expected.params]))
    gone = {path_of(place) for place in elsewhere}
    lacking = [path for path in expected.params if path not in actual.params and path not in expected.options]
    expected = _without(expected, {*gone, *lacking})
    expected, mode_notes = in_live_mode(expected, actual)
    chosen = sampled([*expected.params], sample, seed)
    compared = _Compared(lambda path: path in chosen)
    all_findings = [*findings]
    all_findings += compared.findings(
        "parameter", _named("params", expected.params), _named("params", actual.params)
    )
    all_findings += compared.findings("slot", _slots(expected), _slots(actual))
    all_findings += _options(expected.options, actual.options)
    notes = [_RULE.format(what=expected.what.partition(";")[0]), *_unsaid(expected.options, actual.options)]
    notes += [*mode_notes, *compared.notes]
    notes += [f"the params/{path}: the checkpoint has it, and none was given" for path in lacking]
    if expected.others:
        notes.append(f"{some(sorted(expected.others))}: no parameters and no slots")
    if sample is not None:
        notes.append(
            f"values of {len(expected.params) - len(chosen)} of {len(expected.params)} parameters (sample={sample})"
        )
    for name in _ROWS:
        rows = [
            tree.get(name) if isinstance(tree := place.tree, Mapping) else None
            for place in (checkpoint, running)
        ]
        if None in rows:
            notes += [f"the {name}: one has none"] * (rows != [None, None])
        elif to_json(rows[0]) != to_json(rows[1]):
            kind = "schedule" if name == "scheduler" else name
            all_findings.append(fault(kind, [name], *map(to_json, rows)))
    return Attestation(
        str(checkpoint.path),
        None,
        tuple(all_findings),
        tuple(notes),
        tuple(assumptions),
        len(expected.params),
        compared.tensors,
        compared.bytes_read,
        facts=(ordered(LIVE_ORDER),) if assumptions else (),
    )


def _renamed(contents: Contents, theirs: Mapping[str, str]) -> Contents:
    """Returns a checkpoint's contents under the live names; `theirs` maps them to the checkpoint's."""
    live_names = {path: name for name, path in theirs.items()}

    def renamed(part: Mapping[str, Any]) -> dict[str, Any]:
        return {live_names.get(path, path): value for path, value in part.items()}

    return replace(
        contents,
        params=renamed(contents.params),
        slots=renamed(contents.slots),
        options=renamed(contents.options),
    )


def _without(contents: Contents, paths: Collection[str]) -> Contents:
    def kept(part: Mapping[str, Any]) -> dict[str, Any]:
        return {path: value for path, value in part.items() if path not in paths}

    return replace(
        contents, params=kept(contents.params), slots=kept(contents.slots), options=kept(contents.options)
    )


def _named(top: str, tensors: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    return {(f"{top}/{path}", path): tensor for path, tensor in tensors.items()}


def _slots(contents: Contents) -> dict[tuple[str, str], Tensor]:
    return {
        (f"slots/{path}/{name}", path): tensor
        for path, slots in contents.slots.items()
        for name, tensor in slots.items()
    }


class _Compared:
    """What was compared of tensors, and how much of it was read."""

    def __init__(self, by_value: Callable[[str], bool]) -> None:
        self._by_value = by_value
        self.tensors = self.bytes_read = 0
        self.notes: dict[str, None] = {}

    def findings(
        self, kind: str, right: Mapping[tuple[str, str], Tensor], live: Mapping[tuple[str, str], Tensor]
    ) -> Iterator[Finding]:
        """Yields what is wrong with the live tensors of a kind, by place and path."""
        places: dict[str, list[str]] = {}
        shown: dict[str, tuple[object, object]] = {}

        def add(name: str, place: str, expected: object, found: object) -> None:
            places.setdefault(name, []).append(place)
            shown.setdefault(name, (expected, found))

        for (place, path), tensor in right.items():
            other = live.get((place, path))
            if other is None:
                add(f"{kind}-missing", place, _described(tensor), "nothing")
            elif tensor.shape != other.shape:
                add("shape", place, tensor.shape, other.shape)
            else:
                self._values(kind, place, path, tensor, other, add)
        for place, path in live.keys() - right.keys():
            add(f"{kind}-extra", place, "nothing", _described(live[place, path]))
        for name, where in places.items():
            yield fault(name, sorted(where) if name.endswith("extra") else where, *shown[name])

    def _values(
        self,
        kind: str,
        place: str,
        path: str,
        tensor: Tensor,
        other: Tensor,
        add: Callable[[str, str, object, object], None],
    ) -> None:
        dtypes = tensor.dtype.name, other.dtype.name
        apart = None
        if self._by_value(path):
            self.tensors += 1
            self.bytes_read += nbytes(tensor)
            apart = distance(tensor, other, parts_of(other))
        if apart is not None and apart.unequal:
            if dtypes[0] != dtypes[1] and apart.is_rounding:
                add(f"{kind}-rounded", place, *dtypes)
            elif kind == "slot" and is_zero(other):
                add("slot-zero", place, "the checkpoint's values", apart)
            else:
                add(f"{kind}-differs", place, "the checkpoint's values", apart)
        elif kind == "slot" and dtypes == WIDENED:
            self.notes[widened(place.rpartition("/")[2])] = None
        elif dtypes[0] != dtypes[1]:
            add("dtype", place, *dtypes)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype.name} {list(tensor.shape)}"


def _differ(name: str, right: Mapping[str, object], live: Mapping[str, object]) -> bool:
    """Tells whether an option differs; an option of one side alone does so only if it belongs to the state."""
    if not f"{name}".startswith(_STATE) and not (name in right and name in live):
        return False
    values = [to_json(side.get(name)) for side in (right, live)]
    return bool(values[0] != values[1])


def _moved_by_one(right: Mapping[str, object], live: Mapping[str, object]) -> Iterator[Finding]:
    """Yields the parameters that the checkpoint alone moves, or the live run alone."""
    if paths := [path for path in {**right, **live} if (path in right) != (path in live)]:
        yield fault("frozen", [f"groups/{path}" for path in paths], "moved by both or none", "by one alone")


def _options(
    right: Mapping[str, Mapping[str, object]], live: Mapping[str, Mapping[str, object]]
) -> Iterator[Finding]:
    """Yields the options that differ, and the parameters that one side alone moves."""
    if right and live:
        yield from _moved_by_one(right, live)
    both = [path for path in right if path in live]
    for name in dict.fromkeys(name for path in both for name in {**right[path], **live[path]}):
        where = [path for path in both if _differ(name, right[path], live[path])]
        if where:
            values = [f"{name} {to_json(options[where[0]].get(name))!r}" for options in (right, live)]
            kind = {"lr": "learning-rate", "state/step": "step"}.get(name, "hyperparameter")
            yield fault(kind, [f"groups/{path}/{name}" for path in where], *values)


_STATE = "state/"
"""What options are called that an update leaves behind: a side that has none has lost it."""


def _unsaid(
    right: Mapping[str, Mapping[str, object]], live: Mapping[str, Mapping[str, object]]
) -> Iterator[str]:
    """Yields the options that one side lacks, such as a file of an earlier release."""
    for side, group_values, other in (("the live run", right, live), ("the checkpoint", live, right)):
        if group_values and not other:
            yield f"options: {side} has none"
        names = {
            name: None
            for path, value in group_values.items()
            if path in other
            for name in value
            if name not in other[path]
        }
        for name in names:
            if not f"{name}".startswith(_STATE):
                yield f"{name}: {side} doesn't say it"
