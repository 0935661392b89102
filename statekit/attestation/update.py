"""Whether an update of a live run is the one that its rule makes of the checkpoint's state and the run's gradients.

Each sampled parameter is stepped from the checkpoint's state by the reference text, over intervals: what comes out is
everything that the rule's arithmetic can return (docs/bounds.md), and what the live run made must lie in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from statekit.arrays.backend import Value
from statekit.arrays.intervals import UNIT, Interval, IntervalBackend
from statekit.attestation.attestation import Finding
from statekit.attestation.faults import fault
from statekit.errors import StatekitError, some
from statekit.optim.adafactor import COMPOUNDING
from statekit.optim.gradient_clipping import Limits
from statekit.optim.run import counts_apart, initial, load, mover, settled_group, steps_for
from statekit.state.constants import variant_constants
from statekit.state.evidence import TAKEN
from statekit.state.hyperparameters import settled
from statekit.state.options import stored_rate
from statekit.state.schema import WEIGHTS, load_schema
from statekit.state.train_state import Group, TrainState
from statekit.tensors.tensor import (
    DTYPES,
    Array,
    Index,
    Tensor,
    float_info,
    in_memory,
    normal_index,
    parts_of,
)

ACCUMULATED = "gradient_accumulation_steps"
LARGEST = 1 << 22
"""Elements: of a larger parameter whose elements move by themselves, so many are stepped."""


@dataclass(frozen=True)
class Gradient:
    """A gradient as the optimizer gets it.

    Attributes:
        value: The gradient; of a sharded parameter, the part that this process has.
        divisor: What the optimizer itself divides it by, as a fused kernel does with a loss scale.
        waiting: What it first adds it to: the sum, or the mean, of gradients that waited for this update.
        mean_of: Where that is a running mean, of how many gradients it is one with this; 0 where it is a sum.
        fused: Whether the update was compiled with what made the gradient, and may have used it before it was rounded:
            XLA makes one factor of two that follow each other, and keeps what is converted there and back.
    """

    value: Array
    divisor: float = 1.0
    waiting: Array | None = None
    mean_of: int = 0
    fused: bool = False


@dataclass(frozen=True)
class Chosen:
    """What is stepped.

    Attributes:
        blocks: The block of each parameter; the whole where the rule needs it.
        unchecked: What isn't, and why, a sentence each.
    """

    blocks: Mapping[str, Index]
    unchecked: tuple[str, ...]


def chosen_blocks(
    right: TrainState, live: TrainState, paths: Iterable[str], unstepped: Mapping[str, str] = {}
) -> Chosen:
    """Returns which of some parameters can be stepped here, and what is stepped of each.

    Where a rule takes the gradients of a group together, all of that group are stepped.

    Args:
        right: The checkpoint's state, under the live rule.
        live: The live state; its sharded parameters are stepped where this process has them.
        paths: The sample.
        unstepped: Parameters that the rule alone doesn't move, and why, a phrase each.

    Raises:
        UnknownRuleError: A rule needs a hyperparameter that the checkpoint doesn't say.
    """
    asked = {*paths}
    notes: list[str] = []
    blocks: dict[str, Index] = {}
    for group in right.optimizer.groups:
        wanted = [path for path in group.paths if path in asked and path in live.params]
        if not wanted:
            continue
        if why := _unstepped(right, group, wanted):
            notes.append(f"the update of {why}")
            continue
        schema, variant = right.optimizer.kind(group)
        together = _acts_together(schema, str(variant), group)
        alone = schema == "adamw" and not together
        stepped: dict[str, Index] = {}
        due = group.paths if together else wanted
        for path in due:
            index, why = (None, unstepped[path]) if path in unstepped else _block(live.params[path], alone)
            if index is None:
                notes.append(f"the update of {path}: {why}")
            else:
                stepped[path] = index
        if not together or len(stepped) == len(due):
            blocks.update(stepped)
    return Chosen(blocks, tuple(notes))


def _unstepped(right: TrainState, group: Group, wanted: Sequence[str]) -> str:
    """Returns why no parameter of a group can be stepped; "" if one can."""
    schema, variant = right.optimizer.kind(group)
    if schema == WEIGHTS or variant not in load_schema(schema).stepped:
        return f"{schema}, variant {variant or 'unknown'}: statekit has no step for it"
    settled_group(steps_for(schema, variant), replace(group, paths=tuple(wanted)), right.rules, variant)
    if len(right.optimizer.groups) > 1 and _has_norm(schema, variant, group):
        return f"{some(wanted)}: nothing tells whether the norm that is limited is of this group or all"
    return ""


def _acts_together(schema: str, variant: str, group: Group) -> bool:
    """Tells whether a rule takes a group's gradients together, so that no part of it can be stepped by itself."""
    if schema == "scaled_adam":
        return True
    compounds = variant_constants(schema, variant).get("lr_source") == COMPOUNDING
    limits = _limits(schema, variant, group)
    return compounds or (limits is not None and limits.any)


def _has_norm(schema: str, variant: str, group: Group) -> bool:
    """Tells whether the norm of many gradients together is limited."""
    limits = _limits(schema, variant, group)
    return limits is not None and bool(limits.global_norm_clip_threshold)


def _limits(schema: str, variant: str, group: Group) -> Limits | None:
    """Returns what limits a group's gradients; None where the rule has no such thing."""
    if "gradient_clipping" not in variant_constants(schema, variant):
        return None
    return settled(Limits, schema, variant, group)


def _block(param: Tensor, alone: bool) -> tuple[Index | None, str]:
    """Returns which block of a parameter is stepped, and where none is, why."""
    parts = parts_of(param)
    if parts is not None and not alone:
        return None, "its rule takes the parameter as a whole, and this process has a part"
    blocks = [normal_index(part, param.shape) for part in ((None,) if parts is None else parts)]
    if not blocks:
        return None, "this process has nothing of it"
    whole = max(blocks, key=_size)
    size = _size(whole)
    if size <= LARGEST:
        return whole, ""
    if not alone:
        return None, f"its rule takes all of its {size} elements at once, more than {LARGEST}"
    rows = max(LARGEST // max(size // (whole[0].stop - whole[0].start), 1), 1)
    return (slice(whole[0].start, whole[0].start + rows), *whole[1:]), ""


def _size(index: Index) -> int:
    return math.prod(cut.stop - cut.start for cut in index)


def update_findings(
    right: TrainState,
    after: TrainState,
    chosen: Chosen,
    grads: Mapping[str, Gradient],
    moved: Container[str],
    sqrt_units: float,
    rate: Callable[[Group], Any] = lambda group: None,
    execution: str | None = None,
) -> tuple[list[Finding], list[str], int]:
    """Returns in what an update isn't that of the rule, what couldn't be stepped, and how many tensors were compared.

    Args:
        right: The checkpoint's state, under the live rule.
        after: The live state after one update.
        chosen: What is stepped.
        grads: Gradients of what is stepped, by path.
        moved: The parameters that have a gradient; others aren't moved.
        sqrt_units: How far the framework's square roots may be from the exact ones, in units of 2^-24.
        rate: Learning rate of a group where the caller says it; None: as the checkpoint has it, or else the live run.
        execution: How the live run rounds: a name of `statekit.state.constants`; None: as the rule usually runs.
    """
    try:
        before, rates, notes = _restricted(right, after, chosen.blocks, rate)
        bounds = IntervalBackend(True, sqrt_units=sqrt_units)
        given = {path: _interval(bounds, grads[path]) for path in before.params if path in grads}
        bound = mover(bounds, before, execution)(load(bounds, before), given, rates)
    except StatekitError as error:
        return [], [f"the update: {error.line}"], 0
    rows = [
        _outside(f"params/{path}", after.params[path].read(chosen.blocks[path]), bound.params[path])
        for path in before.params
    ]
    rows += [row for path in before.params for row in _slots(path, before, after, bound.slots[path], chosen)]
    wrong = sorted((row for row in rows if row.count), key=lambda row: row.farthest, reverse=True)
    findings = []
    if wrong:
        first = wrong[0]
        apart = f"{first.count} of {first.size} elements outside, {first.example}"
        findings.append(
            fault("update-differs", [row.place for row in wrong], "within the rule's rounding", apart)
        )
    findings += _steps(right, after, moved)
    return findings, notes, len(rows)


def _restricted(
    right: TrainState, after: TrainState, blocks: Mapping[str, Index], rate: Callable[[Group], Any]
) -> tuple[TrainState, tuple[Any, ...], list[str]]:
    """Returns the checkpoint's state of what is stepped, each group's rate, and what was taken from the live run."""
    groups, rates, notes = _stepped_groups(right, after, blocks, rate)
    moved = [path for group in groups for path in group.paths]
    params = {path: _read(right.params[path], blocks[path]) for path in moved}
    slots = {path: _slots_in(blocks[path], right, path) for path in moved}
    optimizer = replace(right.optimizer, groups=tuple(groups))
    state = replace(right.only(params), params=params, slots=slots, optimizer=optimizer, extra={})
    if not right.counts.updates and not any(slots.values()):
        state = initial(state)
    elif unmade := [path for path in moved if not slots[path] and not right.counts.behind.get(path, 1)]:
        begun = initial(state).slots  # what had no gradient yet gets its slots with its first update
        state = replace(state, slots={**slots, **{path: begun[path] for path in unmade}})
    return state, tuple(rates), list(dict.fromkeys(notes))


def _slots_in(block: Index, state: TrainState, path: str) -> dict[str, Tensor]:
    """Returns the slots of a parameter's block; whole where they have another shape than the parameter."""
    shape = state.params[path].shape
    return {
        name: _read(slot, block if slot.shape == shape else None)
        for name, slot in state.slots.get(path, {}).items()
    }


def _stepped_groups(
    right: TrainState, after: TrainState, blocks: Mapping[str, Index], rate: Callable[[Group], Any]
) -> tuple[list[Group], list[Any], list[str]]:
    """Returns the groups of what is stepped, the rate of each, and what was taken from the live run."""
    groups, rates, notes = [], [], list[str]()
    for group in right.optimizer.groups:
        paths = tuple(path for path in group.paths if path in blocks)
        if not paths:
            continue
        live = after.group_of(paths[0])
        value, taken = _rate_of(group, live, rate)
        rates.append(value)
        hyper = {**group.hyperparameters, **_only_live(group, live)}
        taken += [name for name in hyper if hyper[name] != group.hyperparameters.get(name)]
        if taken:
            names = ", ".join(taken)
            notes.append(f"{names} of the update: the checkpoint doesn't say it, the live one is taken")
        # What waits for an update is part of the gradient that is given.
        hyper |= dict.fromkeys(hyper.keys() & {ACCUMULATED})
        groups.append(replace(group, paths=paths, hyperparameters=hyper))
    return groups, rates, notes


def _rate_of(group: Group, live: Group | None, rate: Callable[[Group], Any]) -> tuple[Any, list[str]]:
    """Returns a group's learning rate, and its name where only the live run says it."""
    value = rate(group)
    if value is None:
        value = _rate(group)
    if value is not None or live is None:
        return value, []
    value = _rate(live)
    return value, [] if value is None else ["the learning rate"]


def _only_live(group: Group, live: Group | None) -> dict[str, Any]:
    """Returns the hyperparameters that the live run says of a group, where the checkpoint's are assumed."""
    if live is None:
        return {}
    return {
        name: live.hyperparameters[name]
        for name, known_from in group.known_from.items()
        if known_from in TAKEN and live.known_from.get(name, "assumed") not in TAKEN
    }


def _read(tensor: Tensor, index: Index | None) -> Tensor:
    return in_memory(tensor.read(index))


def _rate(group: Group) -> Any:
    rate = stored_rate(group.hyperparameters)
    return rate.read().item() if isinstance(rate, Tensor) else rate


def _interval(bounds: IntervalBackend, grad: Gradient) -> Value:
    value = bounds.asarray(grad.value)
    if grad.fused:  # its own rounding, and that of the one factor
        room = float(float_info(DTYPES[grad.value.dtype.name]).eps) / 2 + UNIT
        ends = value.low - np.abs(value.low) * room, value.high + np.abs(value.high) * room
        value = Interval(*ends, value.dtype, True)
    if grad.waiting is not None:
        waiting = bounds.asarray(grad.waiting)
        value = waiting + ((value - waiting) / grad.mean_of if grad.mean_of else value)
    if grad.divisor == 1.0:
        return value
    ends = value.low / grad.divisor, value.high / grad.divisor
    exact = math.frexp(grad.divisor)[0] == 0.5  # by a power of two nothing is rounded
    low, high = np.minimum(*ends), np.maximum(*ends)
    room = 0.0 if exact else 2 * UNIT
    return Interval(low - np.abs(low) * room, high + np.abs(high) * room, value.dtype, True)


@dataclass(frozen=True)
class _Outside:
    """Elements of a tensor that aren't what the rule can make: how many, how far over the largest value, and one."""

    place: str
    count: int
    size: int
    farthest: float
    example: str


def _outside(place: str, live: Array, bound: Interval) -> _Outside:
    values = live.astype(np.float64)
    wrong = ~bound.encloses(values)
    if not wrong.any():
        return _Outside(place, 0, values.size, 0.0, "")
    low, high = (np.broadcast_to(end, values.shape) for end in (bound.low, bound.high))
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    with np.errstate(all="ignore"):
        apart = np.nan_to_num(np.maximum(low - values, values - high), nan=np.inf)
        largest = float(np.max(np.abs(np.nan_to_num(high, posinf=0.0)))) or 1.0
    example = f"{list(at)}: {values[at]:.9g}, the rule makes [{low[at]:.9g}, {high[at]:.9g}]"
    return _Outside(place, int(wrong.sum()), values.size, float(np.max(apart)) / largest, example)


def _slots(
    path: str, before: TrainState, after: TrainState, bound: Mapping[str, Any], chosen: Chosen
) -> Iterator[_Outside]:
    for name in before.slots.get(path, {}):
        live = after.slots.get(path, {}).get(name)
        if live is not None:
            index = chosen.blocks[path] if live.shape == after.params[path].shape else None
            yield _outside(f"slots/{path}/{name}", live.read(index), bound[name])


def _steps(right: TrainState, after: TrainState, moved: Container[str]) -> Iterator[Finding]:
    """Yields the parameters whose count isn't one more than the checkpoint's."""
    wrong: list[tuple[str, int, int]] = []
    for group in right.optimizer.groups:
        schema, variant = right.optimizer.kind(group)
        apart = variant is not None and counts_apart(schema, variant)
        for path in group.paths:
            if path not in after.params:
                continue
            due, done = (side.counts.behind.get(path, side.counts.updates) for side in (right, after))
            due += path in moved or not apart
            if due != done:
                wrong.append((f"updates/{path}", due, done))
    if wrong:
        places = [place for place, _, _ in wrong]
        yield fault(
            "step", places, f"{wrong[0][1]} updates done after one more", f"{wrong[0][2]} updates done"
        )
