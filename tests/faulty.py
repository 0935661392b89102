"""Files with a silent fault: a sample of every layout, written again with one thing wrong.

The fault is made in the canonical state, and written by the layout and container of the sample, so that the file is a
real one of its family. Where a layout has no place for the fault, or refuses it, there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import samples
from samples import Row

from statekit.conversion import registry
from statekit.conversion.contracts import Encoded
from statekit.conversion.open_state import open_state
from statekit.converters.layouts.optax.links import is_number, is_tensor, leaves, replaced
from statekit.errors import StatekitError
from statekit.files.stage import staged
from statekit.state.constants import variant_constants
from statekit.state.schema import WEIGHTS, is_native
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import DTYPES, Array, Tensor, in_memory

Change = Callable[[TrainState], TrainState | None]
DECAY = ("weight_decay_rate", "weight_decay", "wd")
SECOND = ("v_row", "v", "exp_avg_sq")


def rows() -> list[Row]:
    """Returns a sample of every container and layout that statekit writes and that has an optimizer."""
    each: dict[tuple[str, str, str], Row] = {}
    for row in samples.ROWS:
        card = registry.container_card(row.sample.container)
        if card.target_kind and row.sample.writes != "nothing" and row.name != "weights":
            each.setdefault((row.sample.container, row.layout, "+" if "+" in row.name else ""), row)
    return list(each.values())


def faulty(row: Row, folder: Path, change: Change, before: Change | None = None) -> Path | None:
    """Writes a sample with a change; None where the change has no place in it.

    Args:
        row: The sample.
        folder: Where to.
        change: What is wrong.
        before: What is changed of the sample first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sample = row.sample_in(folder)
    with open_state(sample.path, container=sample.container, layout=row.layout, hints=row.hints) as opened:
        state: TrainState | None = opened.state
        for one in (before, change):
            state = state if state is None or one is None else one(state)
        if state is None:
            return None
        try:
            return put(row, folder / "faulty", registry.layout(row.layout).encode(state))
        except (StatekitError, KeyError):
            return None


def put(row: Row, folder: Path, encoded: Encoded) -> Path:
    """Writes what a layout encoded as the container of a sample does."""
    home = registry.container(row.sample.container)
    assert home.target_kind is not None
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"faulty{next(iter(home.suffixes), '')}"
    with staged(target, home.target_kind) as stage:
        home.write(encoded, stage)
        stage.commit(home.open)
    return next(iter(folder.glob("*"))) if not target.exists() else target


def with_slots(state: TrainState, slots: Mapping[str, Mapping[str, Tensor]]) -> TrainState:
    """Returns a state in which some parameters have other slots."""
    return replace(state, slots={path: slots.get(path, old) for path, old in state.slots.items()})


ANY = "*"
"""Stands for the slots of an optimizer without a schema, of which nothing tells what they are."""


def of_slot(names: tuple[str, ...], change: Callable[[Array], Array], least: int = 4) -> Change:
    """Returns what changes the first large enough slot of one of some names."""

    def changed(state: TrainState) -> TrainState | None:
        is_bare = is_native(state.optimizer.schema)
        for path, slots in state.slots.items():
            for name in [*slots] * (ANY in names) if is_bare else names:
                if name in slots and np.prod(slots[name].shape) >= least:
                    made = in_memory(np.asarray(change(slots[name].read().copy())))
                    return with_slots(state, {path: {**slots, name: made}})
        return None

    return changed


def negated(values: Array) -> Array:
    values.flat[0] = -abs(values.flat[0]) - np.asarray(1, values.dtype)
    return values


def spoilt(values: Array) -> Array:
    values.flat[3] = np.nan
    return values


def narrowed(state: TrainState) -> TrainState | None:
    """Rounds a second moment of a parameter that isn't as narrow itself."""
    wide = {path: slots for path, slots in state.slots.items() if state.params[path].dtype == np.float32}
    change = of_slot((*SECOND, "delta", ANY), lambda values: values.astype(DTYPES["bfloat16"]))
    made = change(replace(state, slots=wide))
    return made and with_slots(state, made.slots)


def emptied(state: TrainState) -> TrainState | None:
    """Makes a second moment zero to which its rule adds epsilon."""
    if state.optimizer.schema != "adafactor" or state.optimizer.variant is None:
        return None
    if variant_constants("adafactor", state.optimizer.variant)["epsilon1_place"] != "added_to_square":
        return None
    if any("epsilon1" not in group.hyperparameters for group in state.optimizer.groups):
        return None
    return of_slot(("v_row", "v"), np.zeros_like)(state)


def zeroed(state: TrainState) -> TrainState | None:
    moments = ("m", "delta", *SECOND)
    is_bare = is_native(state.optimizer.schema)
    names = [name for slots in state.slots.values() for name in slots if is_bare or name in moments]
    if not names:
        return None
    # Where no schema describes them, one may be zero yet by design, but not all.
    lost = {*names} if is_bare else {names[0]}
    slots = {
        path: {
            name: in_memory(np.zeros(slot.shape, slot.dtype)) if name in lost else slot
            for name, slot in each.items()
        }
        for path, each in state.slots.items()
    }
    return replace(state, slots=slots)


def uncounted(state: TrainState) -> TrainState | None:
    if is_native(state.optimizer.schema):  # nothing tells which of its slots begin as zeros
        return None
    return replace(state, counts=replace(state.counts, updates=0, schedule=0, behind={}))


def copied(state: TrainState) -> TrainState | None:
    """Gives a parameter the slots of another of its shape, and sees to it that their values differ."""
    by_shape: dict[Any, str] = {}
    for path, slots in state.slots.items():
        param = state.params[path]
        if np.prod(param.shape) < 9 or not slots:
            continue
        key = (param.shape, tuple(sorted(slots)), state.rules.get(path), _kind(state, path))
        first = by_shape.setdefault(key, path)
        if first != path:
            return with_slots(state, {path: state.slots[first]})
    return None


def _kind(state: TrainState, path: str) -> Any:
    group = state.group_of(path)
    return None if group is None else (state.optimizer.kind(group), state.params[path].dtype)


def bare(state: TrainState) -> TrainState | None:
    path = next((p for p, slots in state.slots.items() if slots and np.prod(state.params[p].shape) > 3), None)
    if path is None or state.optimizer.schema == WEIGHTS:
        return None
    return replace(state, slots={p: slots for p, slots in state.slots.items() if p != path})


def unscaled(state: TrainState) -> TrainState | None:
    """Gives a parameter another scale."""
    for path, slots in state.slots.items():
        if "param_rms" in slots and np.prod(state.params[path].shape) > 3:
            values = slots["param_rms"].read()
            wrong = in_memory(values * np.asarray(64, values.dtype))
            return with_slots(state, {path: {**slots, "param_rms": wrong}})
    return None


def overtaken(state: TrainState) -> TrainState | None:
    """Moves parameters away from their masters."""
    masters = [path for path, slots in state.slots.items() if "master" in slots]
    if not masters:
        return None
    moved = {
        path: in_memory(
            (state.params[path].read().astype(np.float32) * 2 + 1).astype(state.params[path].dtype)
        )
        for path in masters
    }
    return replace(state, params={**state.params, **moved})


def late(state: TrainState) -> TrainState | None:
    try:
        return state.with_hyperparameters(step_offset=state.counts.updates + 1000)
    except StatekitError:
        return None


def regrouped(state: TrainState) -> TrainState | None:
    """Puts vectors into a group that is decayed, and matrices into one that isn't."""
    if state.optimizer.several or not state.optimizer.groups:
        return None
    (group, *_) = state.optimizer.groups
    name = next((n for n in DECAY if n in group.hyperparameters), None)
    paths = [path for one in state.optimizer.groups for path in one.paths]
    if name is None:
        return None
    groups = tuple(
        replace(
            group,
            paths=tuple(path for path in paths if (len(state.params[path].shape) > 1) != decayed),
            hyperparameters={**group.hyperparameters, name: 0.1 if decayed else 0.0},
            slots={},
        )
        for decayed in (True, False)
    )
    return (
        replace(state, optimizer=replace(state.optimizer, groups=groups))
        if all(g.paths for g in groups)
        else None
    )


CHANGES: dict[str, Change] = {
    "second-moment-negative": of_slot(SECOND, negated),
    "not-finite": of_slot(("m", "delta", *SECOND, ANY), spoilt),
    "slots-narrow": narrowed,
    "moments-zero": zeroed,
    "moments-of-no-update": uncounted,
    "slots-duplicated": copied,
    "slot-missing": bare,
    "second-moment-zero": emptied,
    "factors-disagree": of_slot(("v_row",), lambda values: values * np.asarray(8, values.dtype)),
    "scale-statistics": unscaled,
    "master-stale": overtaken,
    "step-offset": late,
    "groups-exchanged": regrouped,
}
"""Finding -> how it is made."""


def arrived(name: str, row: Row, path: Path) -> bool:
    """Tells whether a file has the fault: a layout may have no place for what makes it, and leaves it out."""
    with open_state(path, container=row.sample.container, hints=row.hints) as opened:
        state = opened.state
    if name == "step-offset":
        return any(
            g.hyperparameters.get("step_offset", 0) > state.counts.updates for g in state.optimizer.groups
        )
    if name == "groups-exchanged":
        return len(state.optimizer.groups) > 1
    if name == "moments-of-no-update":
        return any(state.slots.values())
    if name == "slot-missing":  # what has no slots is frozen, where nothing else says what is moved
        moved = {path for group in state.optimizer.groups for path in group.paths}
        return any(path in moved and not state.slots.get(path) for path in state.params)
    return True


def is_kept(name: str, row: Row, path: Path) -> bool:
    """Tells the same of a fault between two steps."""
    with open_state(path, container=row.sample.container, hints=row.hints) as opened:
        groups = opened.state.optimizer.groups
    rates = [group.hyperparameters.get(name) for group in groups for name in DECAY]
    return name != "hyperparameter-changed" or 0.125 in rates


def evolved(state: TrainState) -> TrainState:
    """Returns a state some updates later, in which everything has doubled: roundings and means fit as before."""

    def doubled(tensor: Tensor) -> Tensor:
        values = tensor.read()
        return in_memory(values * np.asarray(2, values.dtype)) if values.dtype.kind in "fV" else tensor

    counts = state.counts
    later = {path: count + 4 for path, count in counts.behind.items()}
    steps = {keys: leaf for keys, leaf in leaves(state.extra) if keys[-1:] == ("step",) and is_number(leaf)}
    record = state.extra.get("megatron_common", {})  # Megatron-Core's own record of the run goes on too
    if "iteration" in record:
        record = {**record, "iteration": record["iteration"] + 4}
        state = replace(state, extra={**state.extra, "megatron_common": record})
    moved = {keys: in_memory(np.asarray(leaf.read() + 4)) for keys, leaf in steps.items() if is_tensor(leaf)}
    return replace(
        state,
        extra=replaced(state.extra, moved) if is_native(state.optimizer.schema) else state.extra,
        params={path: doubled(param) for path, param in state.params.items()},
        slots={path: {n: doubled(slot) for n, slot in slots.items()} for path, slots in state.slots.items()},
        counts=replace(counts, updates=counts.updates + 4, schedule=counts.schedule + 4, behind=later),
    )


def stale_moments(earlier: TrainState, later: TrainState) -> TrainState:
    return replace(later, slots=earlier.slots)


def stale_weights(earlier: TrainState, later: TrainState) -> TrainState | None:
    wide = all(param.dtype.itemsize > 2 for param in later.params.values())
    masters = any("master" in slots for slots in later.slots.values())
    rests = any(group.hyperparameters.get("learning_rate") == 0 for group in later.optimizer.groups)
    return replace(later, params=earlier.params) if wide and not masters and not rests else None


def _large(state: TrainState) -> str | None:
    return next((p for p, slots in state.slots.items() if slots and np.prod(state.params[p].shape) > 8), None)


def stale_tensors(earlier: TrainState, later: TrainState) -> TrainState | None:
    path = _large(later)
    if path is None:
        return None
    params = {**later.params, path: earlier.params[path]}
    return replace(with_slots(later, {path: earlier.slots[path]}), params=params)


def lost_slots(earlier: TrainState, later: TrainState) -> TrainState | None:
    path = _large(later)
    return path and replace(later, slots={p: slots for p, slots in later.slots.items() if p != path})  # type: ignore[return-value]


def exchanged(earlier: TrainState, later: TrainState) -> TrainState | None:
    """Exchanges v_row and v_col of a square parameter."""
    for path, slots in later.slots.items():
        pair = [slots[name] for name in ("v_row", "v_col") if name in slots]
        if len(pair) == 2 and pair[0].shape == pair[1].shape and np.prod(pair[0].shape) >= 16:
            return with_slots(later, {path: {**slots, "v_row": slots["v_col"], "v_col": slots["v_row"]}})
    return None


def redecayed(earlier: TrainState, later: TrainState) -> TrainState | None:
    for name in DECAY:
        if any(name in group.hyperparameters for group in later.optimizer.groups):
            try:
                return later.with_hyperparameters(**{name: 0.125})
            except StatekitError:
                return None
    return None


BETWEEN: dict[str, Callable[[TrainState, TrainState], TrainState | None]] = {
    "moments-stale": stale_moments,
    "weights-stale": stale_weights,
    "tensors-stale": stale_tensors,
    "slot-missing": lost_slots,
    "factors-exchanged": exchanged,
    "hyperparameter-changed": redecayed,
}
"""Finding between two steps -> how it is made of the two."""
