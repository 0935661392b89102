"""Holds a live run against its checkpoint, whatever framework the run is in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from statekit.attestation.attestation import Attestation, Finding
from statekit.attestation.diagnosis import diagnosed, fault
from statekit.conversion.contracts import Exactness, Hints
from statekit.conversion.model_settings import with_beside
from statekit.conversion.open_state import OpenState, open_state
from statekit.conversion.rule_change import change_rule
from statekit.dropin.by_name import path_of
from statekit.dropin.matching import renamed
from statekit.errors import StateError, StatekitError, UsageError
from statekit.maps.links import carried_through
from statekit.maps.model_map import maps_of
from statekit.state.comparison import Difference, compare_states
from statekit.state.options import BY_NAME
from statekit.state.run import BUFFERS
from statekit.state.schema import WEIGHTS
from statekit.state.stored_params import as_params
from statekit.state.train_state import TrainState

_ORDERED = (
    "The checkpoint numbers its parameters and nothing in it tells which they are; they are taken in the order of the "
    "live optimizer, so that an order which is wrong can't be seen."
)
_LACKS = {True: "the checkpoint has it, and none was given", False: "the checkpoint has none"}


def attest(
    path: str | PathLike[str],
    live: Callable[[OpenState], TrainState],
    *,
    findings: Iterable[Finding] = (),
    unchecked: Iterable[str] = (),
    names: Mapping[str, str] | None = None,
    map: str | None = None,
    config: Mapping[str, Any] | None = None,
    step: int | None = None,
    hints: Hints,
    order: Sequence[str] | None = None,
    sample: int | None = None,
    seed: int = 0,
    strict: bool = False,
) -> Attestation:
    """Compares a live run with a checkpoint, through the canonical form of both.

    Args:
        path: Anything statekit reads.
        live: Gives the canonical state of the live run, with parameters by the names of the caller.
        findings: What is wrong with the live run apart from its state.
        unchecked: What the caller couldn't compare, a sentence each.
        names: Names in the checkpoint by the caller's, where they differ.
        map: From the checkpoint's model to that of another codebase.
        config: What the map needs to know of the model.
        step: Which step of a run's folder; the newest if None.
        hints: What the checkpoint doesn't say.
        order: Names in the checkpoint in the order of the live optimizer, which is taken where the checkpoint only
            numbers its parameters and nothing else tells which they are.
        sample: How many parameters are compared by value, drawn with `seed`; all if None. Names, shapes, dtypes,
            counts and hyperparameters are compared of all.
        seed: Of the sample.
        strict: Whether to raise what was found.

    Raises:
        StateError: With `strict`, the live run isn't the checkpoint's; or the checkpoint can't be decoded.
        UsageError: A sample of less than one, or names that don't fit.
        NotFoundError, FormatError: The checkpoint can't be read.
    """
    if sample is not None and sample < 1:
        raise UsageError("A sample has at least one parameter.", place="sample", found=sample)
    with _opened(Path(path), step, hints, order) as (opened, ordered):
        right = as_params(opened.state)[0]
        if map is not None or config:
            maps = with_beside(maps_of(map, config, builds=False), opened)
            right = carried_through(right, maps)[0]
        right = _by_path(renamed(right, names or {}, path))
        each, said = list(findings), [*unchecked, *(one.what for one in opened.checkpoint.findings)]
        place = str(opened.checkpoint.path)
        try:
            state = _by_path(live(opened))
        except StatekitError as error:
            each += [fault("broken", [where], "a valid state", what) for what, where in error.faults] or [
                fault("broken", ["the live run"], "a valid state", error.line)
            ]
            result = Attestation(place, right.counts.updates, tuple(each), tuple(said), (), 0, 0, 0)
        else:
            right, more = _under_rule_of(right, state)
            each += more
            paths = [*right.params, *_buffers(right)]
            chosen = _sampled(paths, sample, seed)
            if sample is not None:
                said.append(
                    f"values of {len(paths) - len(chosen)} of {len(paths)} parameters (sample={sample})"
                )
            sides = "the checkpoint", "the live run"
            compared = compare_states(
                right, state, by_value=lambda path: not path or path in chosen, sides=sides
            )
            lacking = [one for one in compared.differences if _is_one_sided(one)]
            each += diagnosed(right, state, [one for one in compared.differences if one not in lacking])
            said += [*compared.unsaid, *(_lack(one) for one in lacking)]
            result = Attestation(
                place,
                right.counts.updates,
                tuple(each),
                tuple(dict.fromkeys(said)),
                (*right.assumptions, *ordered),
                len(right.params),
                compared.tensors,
                compared.bytes_read,
            )
    if strict:
        result.check()
    return result


@contextmanager
def _opened(
    path: Path, step: int | None, hints: Hints, order: Sequence[str] | None
) -> Iterator[tuple[OpenState, tuple[str, ...]]]:
    """Opens a checkpoint; where nothing tells which parameters it means, they are taken in an order, which is said."""
    said: tuple[str, ...] = ()
    try:
        opened = open_state(path, step=step, hints=hints)
    except StateError:
        if order is None or hints.param_names is not None:
            raise
        opened = open_state(path, step=step, hints=replace(hints, param_names=tuple(order)))
        said = (_ORDERED,)
    with opened:
        yield opened, said


def _by_path(state: TrainState) -> TrainState:
    """Returns a state whose paths have slashes for dots, as names of both sides are compared."""
    if all(path_of(path) == path for path in state.params):
        return state
    groups = tuple(
        replace(
            group,
            paths=tuple(path_of(path) for path in group.paths),
            hyperparameters={
                name: {path_of(path): one for path, one in value.items()}
                if name in BY_NAME and isinstance(value, Mapping)
                else value
                for name, value in group.hyperparameters.items()
            },
        )
        for group in state.optimizer.groups
    )
    return replace(
        state,
        params={path_of(path): param for path, param in state.params.items()},
        slots={path_of(path): slots for path, slots in state.slots.items()},
        rules={path_of(path): rule for path, rule in state.rules.items()},
        optimizer=replace(state.optimizer, groups=groups),
        counts=replace(state.counts, behind={path_of(path): n for path, n in state.counts.behind.items()}),
    )


def _buffers(state: TrainState) -> list[str]:
    """Returns the names of what lies beside the parameters that are trained: frozen ones among it."""
    buffers = state.extra.get(BUFFERS)
    return [str(name) for name in buffers] if isinstance(buffers, Mapping) else []


def _sampled(paths: Sequence[str], sample: int | None, seed: int) -> set[str]:
    if sample is None or sample >= len(paths):
        return set(paths)
    return set(random.Random(seed).sample([*paths], sample))


def _under_rule_of(right: TrainState, live: TrainState) -> tuple[TrainState, list[Finding]]:
    """Returns the checkpoint's state as the live optimizer's rule goes on with it, and why that isn't the run's."""
    if (
        right.optimizer.several
        or live.optimizer.several
        or WEIGHTS in (right.optimizer.schema, live.optimizer.schema)
    ):
        return right, []
    (schema, theirs), (live_schema, mine) = right.optimizer.kinds[0], live.optimizer.kinds[0]
    if schema != live_schema or theirs == mine or theirs is None or mine is None:
        return right, []
    change = change_rule(right, theirs, mine)
    worse = [one for one in change.differences if one.exactness > Exactness.ROUNDING]
    return change.state, [
        fault("rule", [one.what], f"{one.source} ({theirs})", f"{one.target} ({mine})") for one in worse
    ]


def _is_one_sided(one: Difference) -> bool:
    """Tells whether only one side has what need not be given; a scaler that the checkpoint lost is a fault."""
    if one.what == "part":
        return one.actual is None
    is_buffer = one.place.startswith(f"{BUFFERS}/") and one.what in ("missing", "extra")
    return is_buffer or (one.what == "schedule" and None in (one.expected, one.actual))


def _lack(one: Difference) -> str:
    name = BUFFERS if one.place.startswith(BUFFERS) else one.item or one.what
    return f"the {name}: {_LACKS[one.actual is None]}"
