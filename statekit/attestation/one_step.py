"""What is wrong with one checkpoint, as its own values, shapes, rules and counts show."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from statekit.attestation.attestation import Finding
from statekit.attestation.faults import fault
from statekit.attestation.few_bits import damaged_parts
from statekit.attestation.reading import Key, Reading, Readings, is_ambiguous, place, precision
from statekit.conversion import registry
from statekit.conversion.belonging import UNREAD, said_steps
from statekit.conversion.contracts import Examines
from statekit.conversion.open_state import OpenState
from statekit.errors import some
from statekit.state.constants import variant_constants
from statekit.state.evidence import TAKEN
from statekit.state.factoring import FACTORED, by_shape, swapped
from statekit.state.param_names import is_adapted
from statekit.state.schema import WEIGHTS, is_native, load_schema
from statekit.state.stored_params import MASTER
from statekit.state.train_state import GONE, Axis, Group, Kind, TrainState
from statekit.tensors.stats import measure
from statekit.tensors.tensor import DTYPES, Shape, Tensor, bytes_of, float_info, nbytes

SMALL = 16
"""Bytes: smaller tensors may well be equal by chance."""
_SKIPPED = 0.5
"""How far the means of v_row and v_col may be apart, of the larger, where NaNs may be skipped in each by itself.

Chosen, not derived (docs/bounds.md): there is no bound, since each NaN leaves out a share of one update."""
_ALL_READ = "a checkpoint whose parts are all read"
_DECAY = ("weight_decay_rate", "weight_decay", "wd")


def of_one_step(opened: OpenState, read: Readings) -> Iterator[Finding]:
    """Yields what is wrong with a checkpoint.

    Args:
        opened: The checkpoint.
        read: What its values are like.
    """
    yield from _of_files(opened, read)
    yield from _not_finite(opened.state, read)
    for state in opened.state.parts():
        if state.optimizer.schema != WEIGHTS:
            for check in _CHECKS:
                yield from check(state, read.tensors)
            yield from damaged_parts(state)
            if not _is_converted(opened):
                yield from _narrow(state)
    yield from _counts(opened)


def odd(opened: OpenState, read: Readings) -> Iterator[str]:
    """Yields what is odd about a checkpoint and may be right, or can't be told from it, a sentence each.

    Args:
        opened: The checkpoint.
        read: What its values are like.
    """
    for finding in opened.checkpoint.findings:
        if not finding.damage and not finding.kind:
            yield f"{finding.what} @ {finding.place}"
    yield from _odd_counts_and_groups(opened)
    trained = [part for part in opened.state.parts() if part.optimizer.schema != WEIGHTS]
    alike = [place(key) for part in trained for key in _alike(part, read.tensors, True)]
    if alike:
        yield (
            f"{some(alike)}: the same bits in several vectors, which are added in the model and have one gradient, or "
            "one of them was saved in the place of several"
        )
    yield from _squares_either_way(opened.state)


def _groups_without_parameters(state: TrainState) -> Iterator[str]:
    """Yields the groups that move nothing, whose options a loader may lose.

    Source: pytorch/pytorch torch/distributed/checkpoint/state_dict.py, `_split_optim_state_dict`.
    """
    for i, group in enumerate(state.optimizer.groups):
        if not group.paths:
            yield f"group {i} moves no parameter; torch's set_optimizer_state_dict drops the options of such a group"


def _odd_counts_and_groups(opened: OpenState) -> Iterator[str]:
    state = opened.state
    if behind := state.counts.behind:
        counts = ", ".join(map(str, sorted({*behind.values()})))
        yield (
            f"{len(behind)} of {len(state.params)} parameters have done {counts} updates, the others "
            f"{state.counts.updates}: without a gradient in the others, or their state was lost"
        )
    for part in state.parts() if _is_converted(opened) else ():
        for narrow in _narrow(part) if part.optimizer.schema != WEIGHTS else ():
            yield f"{some(narrow.where)}: {narrow.found} beside {narrow.expected} parameters, as the source had them"
    moved = set(state.optimizer.paths)
    yield from _groups_without_parameters(state)
    if moved and (still := [path for path in state.params if path not in moved]):
        yield f"{some(still)}: in no group and without slots, so taken as frozen"


def _squares_either_way(state: TrainState) -> Iterator[str]:
    """Yields that nothing tells apart the two factors of square matrices."""
    square = [path for path, rule in state.rules.items() if is_ambiguous(rule, state.params[path].shape)]
    if square and any(FACTORED[0] in state.slots.get(path, {}) for path in square):
        yield (
            f"v_row and v_col have the same shape in {some(square)}: whether they are exchanged can't be told from one "
            "step, only from two of a run"
        )


def _is_converted(opened: OpenState) -> bool:
    """Tells whether a conversion made the checkpoint, and so meant its dtypes."""
    manifest = opened.checkpoint.manifest or {}
    return bool((manifest.get("source") or {}).get("container"))


def _of_files(opened: OpenState, read: Readings) -> Iterator[Finding]:
    by_kind: dict[str, list[Any]] = {}
    meaning = registry.layout(opened.layout)
    seen = meaning.examine(opened.checkpoint, opened.state) if isinstance(meaning, Examines) else ()
    for entry in (*opened.checkpoint.findings, *seen):
        name = (
            "damaged"
            if entry.damage
            else {"mixed": "files", "absent": "values-absent"}.get(entry.kind, entry.kind)
        )
        by_kind.setdefault(name, []).append(entry)
    expected = {"files": "files of one step, whole", "damaged": "what was written", UNREAD: _ALL_READ}
    for name, group in by_kind.items():
        for sentence in dict.fromkeys(entry.what for entry in group) if name else ():
            where = [finding.place for finding in group if finding.what == sentence]
            yield fault(name, where, expected.get(name, "values of the run"), sentence)
    for error in dict.fromkeys(read.damaged.values()):
        where = [place(key) for key, damage in read.damaged.items() if damage is error]
        yield fault("damaged", where, "what was written", error.line)


def _not_finite(state: TrainState, read: Readings) -> Iterator[Finding]:
    # A threshold is infinite until there is one; the mean of no elements is NaN.
    thresholds = {
        name
        for schema, _ in state.optimizer.kinds
        if schema != WEIGHTS
        for name, slot in load_schema(schema).slots.items()
        if slot.shape == "group"
    }
    empty = {path for path, param in state.params.items() if not math.prod(param.shape)}
    wrong = [
        place((path, name))
        for (path, name), tensor in read.tensors.items()
        if not tensor.is_finite and path not in empty and name not in thresholds
    ]
    if wrong:
        yield fault("not-finite", wrong, "finite values", "NaN or Inf")


def _keys(state: TrainState, read: Mapping[Key, Reading]) -> Iterator[tuple[str, str, Reading]]:
    """Yields every slot of parameters with elements: path, name, and what its values are like."""
    for path, slots in state.slots.items():
        for name in slots:
            if (path, name) in read and (param := read.get((path, ""))) is not None and param.size:
                yield path, name, read[path, name]


def _squares(state: TrainState, group: Group) -> set[str]:
    """Returns the slots that are means of squares of gradients, or the largest of such."""
    schema = load_schema(state.optimizer.kind(group)[0])
    return {name for name, slot in schema.data["slots"].items() if slot["gradient_power"]["power"] == 2}


def _has_a_count(state: TrainState, group: Group) -> bool:
    """Tells whether a group's optimizer counts its updates; else no count can be lost."""
    schema, variant = state.optimizer.kind(group)
    constants = {} if variant is None else load_schema(schema).variant(variant)["constants"]
    return constants.get("step_scope") != "absent"


def _negative(state: TrainState, read: Mapping[Key, Reading]) -> Iterator[Finding]:
    squares = {path: _squares(state, group) for group in state.optimizer.groups for path in group.paths}
    wrong = [
        place((path, name))
        for path, name, reading in _keys(state, read)
        if reading.is_negative and name in squares.get(path, ())
    ]
    if wrong:
        yield fault("second-moment-negative", wrong, "zero or more", "less than zero")


def _before_any_update(state: TrainState, readings: Sequence[tuple[str, str, Reading]]) -> Iterator[Finding]:
    """Yields moments that have values before any update of an optimizer that counts them."""
    counted = {path for group in state.optimizer.groups if _has_a_count(state, group) for path in group.paths}
    kept = [
        place((path, name))
        for path, name, reading in readings
        if path in counted and not reading.is_zero and load_schema(_schema(state, path)).slots[name].init == 0
    ]
    if kept:
        yield fault("moments-of-no-update", kept, "zeros before the first update", "values")


def _zero(state: TrainState, read: Mapping[Key, Reading]) -> Iterator[Finding]:
    """Yields moments that are zero after updates, and those that aren't before any."""
    moments = list(_keys(state, read))
    if not state.counts.updates:
        yield from _before_any_update(state, moments)
        return
    due: dict[str, dict[str, Reading]] = {}
    for path, name, reading in moments:
        if state.counts.updates >= _first_value(state, path, name):
            due.setdefault(name, {})[path] = reading
    if is_native(state.optimizer.schema) and not _are_lost(state, due):
        return
    for name, readings in due.items():
        zeros = [path for path, reading in readings.items() if reading.is_zero]
        if len(zeros) == len(readings):
            where = [place((path, name)) for path in zeros]
            yield fault("moments-zero", where, f"values after {state.counts.updates} updates", "zeros")
        else:
            yield from _second_moments_of_zeros(state, read, name, zeros)


def _second_moments_of_zeros(
    state: TrainState, read: Mapping[Key, Reading], name: str, zeros: Sequence[str]
) -> Iterator[Finding]:
    """Yields the second moments that can't be zero, of the parameters whose slot of a name is, and others' isn't."""
    if where := [place((path, name)) for path in zeros if _never_zero(state, path, name)]:
        yield fault("second-moment-zero", where, "at least epsilon1", "zeros")
    if where := [place((path, name)) for path in zeros if _has_lost_squares(state, read, path, name)]:
        yield fault("second-moment-zero", where, "squares of what the first moment averages", "zeros")


def _are_lost(state: TrainState, readings: Mapping[str, Mapping[str, Reading]]) -> bool:
    """Tells whether all slots are zero of an optimizer whose rule isn't known: some of them it may leave at zero.

    Masks and slots without elements say nothing.
    """
    telling = [
        reading
        for name, values in readings.items()
        for path, reading in values.items()
        if reading.size and state.slots[path][name].dtype.kind != "b"
    ]
    return bool(telling) and all(reading.is_zero for reading in telling)


def _first_value(state: TrainState, path: str, name: str) -> int:
    """Returns after how many updates a slot has its first value."""
    if name != "scale_exp_avg_sq":
        return 1
    group = state.group_of(path)
    period = None if group is None else group.hyperparameters.get("size_update_period")
    return 2 * period if isinstance(period, int) else 2**62


def _never_zero(state: TrainState, path: str, name: str) -> bool:
    """Tells whether epsilon is added to every square that a slot is the mean of."""
    group = state.group_of(path)
    if group is None or name not in (*FACTORED, "v") or state.counts.behind.get(path) == 0:
        return False
    schema, variant = state.optimizer.kind(group)
    epsilon = group.hyperparameters.get("epsilon1")
    if schema != "adafactor" or variant is None or not isinstance(epsilon, (int, float)):
        return False
    added = variant_constants(schema, variant)["epsilon1_place"] == "added_to_square"
    # What is below the least number of the slot's dtype is zero in it.
    return added and epsilon > 1e-37 and state.slots[path][name].dtype == np.float32


def _has_lost_squares(state: TrainState, read: Mapping[Key, Reading], path: str, name: str) -> bool:
    """Tells whether a second moment of zeros stands beside a first moment that no gradients with such squares give.

    Squares below the least normal number may be zero. A gradient k updates ago then was at most
    sqrt(least / (1 - beta2)) / beta2^(k/2), which the first moment has by (1 - beta1) beta1^k.
    """
    group, kept = state.group_of(path), state.slots[path]
    if (
        group is None
        or name not in _squares(state, group)
        or (path, "m") not in read
        or read[path, "m"].is_zero
    ):
        return False
    usual = load_schema(state.optimizer.kind(group)[0]).data["slots"]["m"]["gradient_power"]["power"] == 1
    beta1, beta2 = (
        group.hyperparameters.get(n, default) for n, default in (("beta1", 0.9), ("beta2", 0.999))
    )
    tensors = (state.params[path], kept["m"], kept[name])
    if not usual or any(tensor.dtype.kind in "biu" for tensor in tensors):
        return False
    if not (
        isinstance(beta1, (int, float)) and isinstance(beta2, (int, float)) and 0 <= beta1 < beta2**0.5 < 1
    ):
        return False
    least = max(float(float_info(tensor.dtype).smallest_normal) for tensor in tensors)
    bound = math.sqrt(least / (1 - beta2)) * (1 - beta1) / (1 - beta1 / math.sqrt(beta2))
    stats = measure(kept["m"])
    return max(-(stats.minimum or 0.0), stats.maximum or 0.0) > _SURELY * bound


_SURELY = 1024
"""How far above the bound a first moment must be: betas may have changed. Chosen, not derived (docs/bounds.md)."""


def _schema(state: TrainState, path: str) -> str:
    group = state.group_of(path)
    return state.optimizer.schema if group is None else state.optimizer.kind(group)[0]


def _duplicated(state: TrainState, read: Mapping[Key, Reading]) -> Iterator[Finding]:
    same = [place(key) for key in _alike(state, read, False)]
    if same:
        yield fault("slots-duplicated", same, "its own of each parameter", "the same bits")


def _alike(state: TrainState, read: Mapping[Key, Reading], added: bool) -> Iterator[tuple[str, str]]:
    """Yields slots that several parameters of other values have to the bit, by path and name.

    Vectors that are added have one gradient: an LSTM's biases, or a shortcut's and what it goes round.

    Args:
        state: The state.
        read: What its values are like.
        added: Whether those of vectors that may be added, or of all others: these are of one module, or each stands
            beside a matrix of its own, as biases do.
    """
    by_digest: dict[tuple[str, str], list[str]] = {}
    for path, name, slot_values in _keys(state, read):
        if not slot_values.is_zero and nbytes(state.slots[path][name]) >= SMALL:
            by_digest.setdefault((name, slot_values.digest), []).append(path)
    around = {_module(path) for path, param in state.params.items() if len(param.shape) > 1}
    for (name, _), paths in by_digest.items():
        modules = {_module(path) for path in paths}
        are_vectors = all(len(state.params[path].shape) == 1 for path in paths)
        may_be_added = are_vectors and (len(modules) == 1 or modules <= around)
        if may_be_added is added and len({read[path, ""].digest for path in paths}) > 1:
            yield from ((path, name) for path in paths)


def _module(path: str) -> str:
    return path.rpartition("/")[0]


def _missing(state: TrainState, read: Mapping[Key, Reading]) -> Iterator[Finding]:
    """Yields parameters that lack what others of their group have, unless a rule or their size says so."""
    gone: dict[str, list[str]] = {}
    odd: dict[str, str] = {}
    for words, where in state.gaps():
        if words == GONE:
            gone.setdefault(where.removeprefix("slots/").rpartition("/")[0], []).append(where)
        else:
            odd[where] = words
    for group in state.optimizer.groups if state.counts.updates else ():
        yield from _missing_in(group, state, [*chain.from_iterable(gone.get(p, ()) for p in group.paths)])
    if odd:
        yield fault("undecodable", [*odd], "floating-point numbers", ", ".join({*odd.values()}))


def _missing_in(group: Group, state: TrainState, gaps: Collection[str]) -> Iterator[Finding]:
    having = {path: state.slots[path] for path in group.paths if state.slots.get(path)}
    names = dict.fromkeys(chain.from_iterable(having.values()))
    shapes = {path: state.params[path].shape for path in group.paths}
    bare = [path for path, shape in shapes.items() if path not in having and shape and 0 not in shape]
    # Around an adapter that was trained, the model is frozen, whether the optimizer was given it or not.
    is_frozen = any(map(is_adapted, having)) and not any(map(is_adapted, bare))
    if bare and having and not is_frozen:
        yield fault("slot-missing", [f"slots/{path}" for path in bare], ", ".join(names), "nothing")
    where = dict.fromkeys((*_lacking_among(having, shapes, state.optimizer.kind(group)), *gaps))
    if where:
        yield fault("slot-missing", [*where], "the slots that the rule needs, or that others have", "nothing")


def _lacking_among(
    having: Mapping[str, Mapping[str, Tensor]], shapes: Mapping[str, Shape], kind: Kind
) -> Iterator[str]:
    """Yields the slots that parameters lack and others have; of a rule that isn't known, others of their shape.

    Such a rule may factor by rank or size.
    """
    schema, variant = kind
    alike = {path: shapes[path] if is_native(schema) else None for path in having}
    for shape in dict.fromkeys(alike.values()):
        compared = {path: slots for path, slots in having.items() if alike[path] == shape}
        names = {name for slots in compared.values() for name in slots}
        yield from _lacking(compared, shapes, _common(names, variant))


def _lacking(
    slots: Mapping[str, Mapping[str, Tensor]], shapes: Mapping[str, Shape], common: Collection[str]
) -> Iterator[str]:
    """Yields the common slots that parameters lack, unless they are of an axis that a parameter hasn't got."""
    axes = {name: _axis_of(name, slots, shapes) for name in common}
    for path, kept in slots.items():
        if math.prod(shapes[path]) > 1:
            missing = (name for name in sorted({*common} - {*kept}) if axes[name] < len(shapes[path]))
            yield from (f"slots/{path}/{name}" for name in missing)


def _axis_of(name: str, slots: Mapping[str, Mapping[str, Tensor]], shapes: Mapping[str, Shape]) -> int:
    """Returns which axis of its parameters a slot belongs to, as SM3's `mu.1` does; -1 if to none."""
    number = _NUMBER.search(name)
    axis = int(number[1]) if number else -1
    fits = (
        len(shapes[path]) > axis >= 0 and math.prod(kept[name].shape) == shapes[path][axis]
        for path, kept in slots.items()
        if name in kept
    )
    return axis if all(fits) else -1


_NUMBER = re.compile(r"[._](\d{1,2})$")


def _common(names: set[str], variant: str | None) -> set[str]:
    """Returns the slots that all parameters of a group have that have some.

    A factored parameter has v_row and v_col, another has v; a master is missing where weights are float32. Of several
    optimizers that are carried together each has slots of its own.
    """
    return set() if _MIXED in (variant or "") else names - {"v", *FACTORED, MASTER}


_MIXED = " and "
"""In the variant of optimizers that are carried together."""
_PART = re.compile(r"(.+)/part_(\d{1,5})", re.DOTALL)
"""The path of a part of a variable: layouts call it so where a system partitions variables."""


def _parts(state: TrainState, read: Mapping[Key, Reading]) -> Iterator[Finding]:
    """Yields parts of variables that are missing, or have no slots where the others have."""
    parts: dict[str, dict[int, str]] = {}
    for path in state.params:
        if match := _PART.fullmatch(path):
            parts.setdefault(match[1], {})[int(match[2])] = path
    moved = set(state.optimizer.paths)
    for name, numbered in parts.items():
        gone = [f"params/{name}/part_{i}" for i in range(max(numbered)) if i not in numbered]
        if gone:
            yield fault("parts-missing", gone, f"parts 0 to {max(numbered)}", "others")
        bare = [path for path in numbered.values() if path not in moved]
        if 0 < len(bare) < len(numbered):
            yield fault(
                "slot-missing",
                [f"slots/{path}" for path in bare],
                "the slots that other parts have",
                "nothing",
            )


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
        if narrow and not (
            is_native(schema.name) and _may_be_design(state, group, [key[:2] for key in narrow])
        ):
            path, _, slot = narrow[0]
            where = [f"slots/{path}/{name}" for path, name, _ in narrow]
            yield fault("slots-narrow", where, state.params[path].dtype.name, slot.dtype.name)


def _may_be_design(state: TrainState, group: Group, narrow: Collection[Key]) -> bool:
    """Tells whether an unknown rule may keep these slots in fewer bits: some of its slots, in every parameter."""
    kept = {(path, name) for path in group.paths for name in state.slots.get(path, {})}
    wide = {(name, state.params[path].dtype) for path, name in kept.difference(narrow)}
    return bool(wide) and wide.isdisjoint((name, state.params[path].dtype) for path, name in narrow)


def _masters(state: TrainState, read: Mapping[Key, Reading]) -> Iterator[Finding]:
    stale = {
        path: reading for path, name, reading in _keys(state, read) if name == MASTER and reading.unrounded
    }
    if stale:
        (first, *_) = stale.values()
        where = [f"slots/{path}/{MASTER}" for path in stale]
        seen = f"{first.unrounded} of {first.size} elements that round to something else"
        yield fault("master-stale", where, "a master that rounds to its parameter", seen)


def _factors(state: TrainState, read: Mapping[Key, Reading]) -> Iterator[Finding]:
    """Yields factored moments whose two halves can't be of one second moment, or stand in each other's place."""
    gaps = {path: _gap(read, path) for path in state.rules}
    bounds = {path: _bound(state, path, rule.axes) for path, rule in state.rules.items() if gaps[path]}
    apart = [path for path, bound in bounds.items() if gaps[path] > bound]
    if apart:
        apart.sort(key=lambda path: -gaps[path])
        where = [place((path, name)) for path in apart for name in FACTORED]
        seen = f"{gaps[apart[0]]:.3g} of them apart"
        yield fault("factors-disagree", where, "equal means of v_row and v_col", seen)
    yield from _exchanged(state)


def _gap(read: Mapping[Key, Reading], path: str) -> float:
    """Returns how far the means of v_row and v_col are apart, relative to the larger; 0.0 where they say nothing."""
    row, column = (_finite_means(read.get((path, name))) for name in FACTORED)
    if row is None or column is None or row.shape != column.shape or not row.size:
        return 0.0
    largest = np.maximum(np.abs(row), np.abs(column))
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.where(largest > 0, np.abs(row - column) / largest, 0.0).max())


def _finite_means(reading: Reading | None) -> Any:
    return reading.means if reading is not None and reading.is_finite else None


def _exchanged(state: TrainState) -> Iterator[Finding]:
    """Yields the matrices that are factored the other way round than their implementation would."""
    exchanged = [path for path in state.rules if _against_shape(state, path)]
    if exchanged:
        where = [place((path, name)) for path in exchanged for name in FACTORED]
        axes = by_shape(_form(state, exchanged[0]) or {}, state.params[exchanged[0]].shape, True)
        labels = [
            ", ".join(a.value for a in rule_axes) for rule_axes in (axes, state.rules[exchanged[0]].axes)
        ]
        yield fault("factors-exchanged", where, *labels)


def _bound(state: TrainState, path: str, axes: Sequence[Axis]) -> float:
    """Returns how far the means of v_row and v_col may be apart, relative to them: by rounding, or by skipped NaNs.

    Both average the same squares with the same weights. Each update rounds a half at most three times, which decays as
    the squares do, over at most as many updates as were done; each mean rounds once for each number that it adds up.
    """
    shape = state.params[path].shape
    added = sum(n for n, axis in zip(shape, axes, strict=True) if axis in (Axis.ROW, Axis.COLUMN))
    unit = max(
        precision(tensor) for tensor in (state.params[path], *map(state.slots[path].get, FACTORED)) if tensor
    )
    rounding = 2 * unit * (3 * max(1, state.counts.updates) + added)
    return max(rounding, _SKIPPED) if _may_skip_nan(state, path) else rounding


def _may_skip_nan(state: TrainState, path: str) -> bool:
    """Tells whether NaNs may have been left out of v_row and of v_col, each by itself: nobody said that none are."""
    group = state.group_of(path)
    name = "skip_nan_updates"
    return group is not None and (
        bool(group.hyperparameters.get(name)) or group.known_from.get(name) in TAKEN
    )


def _form(state: TrainState, path: str) -> Mapping[str, Any] | None:
    group = state.group_of(path)
    if group is None:
        return None
    schema, variant = state.optimizer.kind(group)
    return variant_constants("adafactor", variant) if schema == "adafactor" and variant else None


def _against_shape(state: TrainState, path: str) -> bool:
    """Tells whether a matrix is factored the other way round than its implementation would, which goes by size."""
    rule, shape, form = state.rules[path], state.params[path].shape, _form(state, path)
    if form is None or len(shape) != 2 or not rule.factored or is_ambiguous(rule, shape):
        return False
    return rule.axes == swapped(by_shape(form, shape, True)) and FACTORED[0] in state.slots.get(path, {})


def _scales(state: TrainState, read: Mapping[Key, Reading]) -> Iterator[Finding]:
    """Yields ScaledAdam's scales that aren't those of their parameters.

    Since its last refresh a parameter has moved by delta with each update. Only the last is kept: that none was more
    than twice as much is chosen, not derived (docs/bounds.md).
    """
    rms = {path: (_rms(read, path, ""), _rms(read, path, "param_rms")) for path in state.slots}
    scaled = {path: (actual, kept) for path, (actual, kept) in rms.items() if not math.isnan(actual + kept)}
    wrong = {
        path: (actual, kept)
        for path, (actual, kept) in scaled.items()
        if abs(actual - kept) > _room(state, read, path, actual)
    }
    if wrong:
        actual, kept = next(iter(wrong.values()))
        where = [place((path, "param_rms")) for path in wrong]
        expected = f"about {actual:.4g}, the parameter's root mean square"
        yield fault("scale-statistics", where, expected, f"{kept:.4g}")
    lost = [path for path in scaled if _lost(state, read, path, _period(state, path))]
    if lost:
        where = [place((path, "scale_exp_avg_sq")) for path in lost]
        yield fault("scale-statistics", where, "what scale_grads of the last period give at least", "less")


def _rms(read: Mapping[Key, Reading], path: str, name: str) -> float:
    """Returns the root mean square of a tensor's values; NaN for no tensor or values that aren't finite."""
    reading = read.get((path, name))
    if reading is None or reading.squares is None or not reading.is_finite or not reading.size:
        return math.nan
    return math.sqrt(reading.squares / reading.size)


def _room(state: TrainState, read: Mapping[Key, Reading], path: str, rms: float) -> float:
    """Returns how far a parameter's root mean square may have moved from its scale since the last refresh."""
    step = _rms(read, path, "delta")
    period, updates = _period(state, path), state.counts.behind.get(path, state.counts.updates)
    since = updates % period + 1 if updates >= period else updates
    moved = 0.0 if math.isnan(step) else 2 * since * step
    return moved + rms * (2.0**-6 + 4 * precision(state.slots[path]["param_rms"]))


def _period(state: TrainState, path: str) -> int:
    group = state.group_of(path)
    period = None if group is None else group.hyperparameters.get("size_update_period")
    return period if isinstance(period, int) else 4


def _lost(state: TrainState, read: Mapping[Key, Reading], path: str, period: int) -> bool:
    """Tells whether the scale's second moment is less than what its last period alone has brought it."""
    updates, group = state.counts.behind.get(path, state.counts.updates), state.group_of(path)
    grads, moment = (read.get((path, name)) for name in ("scale_grads", "scale_exp_avg_sq"))
    beta2 = None if group is None else group.hyperparameters.get("beta2")
    if (
        grads is None
        or moment is None
        or grads.squares is None
        or not grads.size
        or not isinstance(beta2, float)
    ):
        return False
    if updates < 2 * period or updates % period:  # rows of two periods stand mixed
        return False
    least = (1 - beta2**period) * grads.squares / grads.size
    value = float(state.slots[path]["scale_exp_avg_sq"].read().reshape(-1)[0])
    return value < least * (1 - 2.0**-4)


def _offsets(state: TrainState, read: Mapping[Key, Reading]) -> Iterator[Finding]:
    for i, group in enumerate(state.optimizer.groups):
        offset = group.hyperparameters.get("step_offset")
        if isinstance(offset, int) and offset > state.counts.updates:
            yield fault("step-offset", [f"groups/{i}/step_offset"], f"at most {state.counts.updates}", offset)


def _groups(state: TrainState, read: Mapping[Key, Reading]) -> Iterator[Finding]:
    """Yields groups that decay vectors alone beside others that don't decay matrices."""
    decayed: dict[bool, list[Group]] = {True: [], False: []}
    for group in state.optimizer.groups:
        rates = [group.hyperparameters[name] for name in _DECAY if name in group.hyperparameters]
        if group.paths and len(rates) == 1 and isinstance(rates[0], (int, float)):
            decayed[bool(rates[0])].append(group)
    ranks = {
        key: {len(state.params[path].shape) > 1 for group in groups for path in group.paths}
        for key, groups in decayed.items()
    }
    if ranks == {True: {False}, False: {True}}:
        where = [path for groups in decayed.values() for group in groups for path in group.paths]
        yield fault("groups-exchanged", where, "weight decay of matrices", "weight decay of vectors alone")


_Check = Callable[[TrainState, Mapping[Key, Reading]], Iterator[Finding]]
_CHECKS: tuple[_Check, ...] = (
    _zero, _negative, _factors, _duplicated, _missing, _parts, _masters, _scales, _groups, _offsets,
)  # fmt: skip


def _counts(opened: OpenState) -> Iterator[Finding]:
    """Yields counts that are stored in few bits, or that were."""
    state, checkpoint = opened.state, opened.checkpoint
    if state.optimizer.schema == WEIGHTS or not state.counts.updates:
        return
    read_values = {bytes_of(tensor) for tensor in _values(state)}
    counts = {state.counts.updates, state.counts.schedule, *state.counts.behind.values()} - {0}
    yield from narrow_counts(
        {name: tensor for name, tensor in checkpoint.tensors.items() if bytes_of(tensor) not in read_values},
        counts,
    )
    for step in said_steps(checkpoint, state):
        if abs(step.step) >= _NO_COUNT:
            continue
        for name in _FEW_BITS:
            rounded = float(np.asarray(step.step, np.float64).astype(DTYPES[name]).astype(np.float64))
            if step.step != state.counts.updates == rounded:
                expected = f"{step.step}, as {step.place} says"
                yield fault("count-rounded", ["updates"], expected, state.counts.updates)
                return


def narrow_counts(
    tensors: Mapping[str, Tensor], counts: Collection[float] | None = None
) -> Iterator[Finding]:
    """Yields scalars of few bits that are counts.

    Args:
        tensors: By name, without those that parameters and slots are made of.
        counts: What the counts are; None if unknown: then every whole number from 1 on may be one.
    """
    narrow = []
    for name, tensor in tensors.items():
        if math.prod(tensor.shape) == 1 and tensor.dtype.name in _FEW_BITS:
            value = float(tensor.read().reshape(-1)[0])
            if value in counts if counts is not None else value >= 1 and value.is_integer():
                narrow.append((name, tensor.dtype.name))
    if narrow:
        yield fault("count-narrow", [name for name, _ in narrow], "an integer, or float32", narrow[0][1])


_FEW_BITS = ("bfloat16", "float16")
_NO_COUNT = 2**63
"""Whole numbers from here on count nothing, and may have no float."""


def _values(state: TrainState) -> Iterable[Tensor]:
    yield from state.params.values()
    for slots in state.slots.values():
        yield from slots.values()
    for group in state.optimizer.groups:
        yield from group.slots.values()
