"""Faults that conversions and resumes have, written into files of every family: each is refuted, by the right name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import state_writer

from goldens import COMPACT
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import NO_HINTS, Hints
from statekit.conversion.open_state import open_state
from statekit.optim.run import load, store
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import DTYPES, Array, in_memory
from statekit.testing.layouts import made_state
from statekit.verify.controls import is_momentum, is_second_moment
from statekit.verify.verification import verify


@dataclass(frozen=True)
class Family:
    """A run whose optimizer is of one schema."""

    place: str
    hints: CheckpointRef = NO_HINTS


FAMILIES = {
    "adafactor": Family("t5x/momentum_f32/checkpoint/checkpoint_4", Hints({"beta1": 0.9})),
    "adamw": Family("torch_formats/adamw_legacy/checkpoint/checkpoint.pt"),
    "lans": Family("mxnet_lans/fused_bounds_clip_rescale/checkpoint"),
    "scaled_adam": Family(
        "scaled_adam/zipformer2025_basic/checkpoint/checkpoint-6.pt", Hints(variant="zip2025")
    ),
    "lamb": Family(""),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def source_of(family: str, folder: Path) -> Path:
    """Returns the run's checkpoint; that of LAMB, of which none is recorded here, is written."""
    if FAMILIES[family].place:
        return COMPACT / FAMILIES[family].place
    path = folder / family
    if not path.exists():
        path.mkdir()
        write = state_writer("orbax", "optax", lambda: made_state("lamb", "optax"))
        write(path)
    return path / "written"


@cache
def state_of(path: Path, family: str) -> TrainState:
    with open_state(path, hints=FAMILIES[family].hints) as opened:
        xp, state = NumpyBackend(), opened.state
        return replace(store(xp, load(xp, state), state), extra={})


def written(state: TrainState, folder: Path) -> Path:
    return state_writer("statekit", "statekit", lambda: state)(folder)


Fault = Callable[[TrainState], tuple[TrainState, str] | None]
"""Makes a wrong state of a right one, and says what must be named; None where the family has no such thing."""


def slot(state: TrainState, which: Callable[[TrainState, str, str], bool]) -> tuple[str, str] | None:
    """Returns the path and name of the largest slot of a kind."""
    fitting = [
        (path, name) for path, slots in state.slots.items() for name in slots if which(state, path, name)
    ]
    return max(fitting, key=lambda key: state.slots[key[0]][key[1]].read().size, default=None)


def with_slot(state: TrainState, key: tuple[str, str], values: Array) -> tuple[TrainState, str]:
    path, name = key
    slots = {**state.slots, path: {**state.slots[path], name: in_memory(values, name)}}
    return replace(state, slots=slots), f"slots/{path}/{name}"


def changed(which: Callable[[TrainState, str, str], bool], change: Callable[[Array], Array]) -> Fault:
    def fault(state: TrainState) -> tuple[TrainState, str] | None:
        key = slot(state, which)
        return None if key is None else with_slot(state, key, change(state.slots[key[0]][key[1]].read()))

    return fault


def any_slot(state: TrainState, path: str, name: str) -> bool:
    return state.slots[path][name].shape != ()


def option(names: tuple[str, ...], change: Callable[[Any], Any]) -> Fault:
    def fault(state: TrainState) -> tuple[TrainState, str] | None:
        groups = []
        named = ""
        for group in state.optimizer.groups:
            values = dict(group.hyperparameters)
            for name in names:
                if values.get(name) not in (None, 0, 0.0) and not named:
                    values[name], named = change(values[name]), name
            groups.append(replace(group, hyperparameters=values))
        return (
            (replace(state, optimizer=replace(state.optimizer, groups=tuple(groups))), named)
            if named
            else None
        )

    return fault


def param_changed(change: Callable[[Array], Array]) -> Fault:
    def fault(state: TrainState) -> tuple[TrainState, str]:
        path = max(state.params, key=lambda one: state.params[one].read().size)
        params = {**state.params, path: in_memory(change(state.params[path].read()), path)}
        return replace(state, params=params), f"params/{path}"

    return fault


def exchanged_slots(state: TrainState) -> tuple[TrainState, str] | None:
    """Two parameters of equal shapes have each other's slots."""
    seen: dict[Any, str] = {}
    for path, slots in state.slots.items():
        shapes = tuple((name, one.shape) for name, one in slots.items())
        if (other := seen.setdefault(shapes, path)) != path:
            both = {path: state.slots[other], other: slots}
            return replace(state, slots={**state.slots, **both}), f"slots/{path}/"
    return None


def rolled(values: Array) -> Array:
    return np.roll(values, 1)


def one_more_bit(values: Array) -> Array:
    flat = values.copy().reshape(-1)
    flat[len(flat) // 2] = np.nextafter(flat[len(flat) // 2], np.asarray(np.inf, flat.dtype))
    return flat.reshape(values.shape)


def with_nan(values: Array) -> Array:
    flat = values.copy().reshape(-1)
    flat[0] = np.nan
    return flat.reshape(values.shape)


def in_bfloat16(values: Array) -> Array:
    return values.astype(DTYPES["bfloat16"]).astype(values.dtype)


def late(state: TrainState) -> tuple[TrainState, str]:
    counts = replace(state.counts, updates=state.counts.updates + 1, schedule=state.counts.schedule + 1)
    return replace(state, counts=counts), "updates/"


def missing_slot(state: TrainState) -> tuple[TrainState, str] | None:
    key = slot(state, is_momentum)
    if key is None:
        return None
    path, name = key
    slots = {one: dict(each) for one, each in state.slots.items()}
    del slots[path][name]
    return replace(state, slots=slots), f"slots/{path}/{name}"


def frozen(state: TrainState) -> tuple[TrainState, str] | None:
    path = next(iter(state.params))
    groups = tuple(replace(g, paths=tuple(p for p in g.paths if p != path)) for g in state.optimizer.groups)
    slots = {one: each for one, each in state.slots.items() if one != path}
    rules = {one: each for one, each in state.rules.items() if one != path}
    optimizer = replace(state.optimizer, groups=groups)
    return replace(state, slots=slots, rules=rules, optimizer=optimizer), path


def rows_for_columns(state: TrainState) -> tuple[TrainState, str] | None:
    for path, slots in state.slots.items():
        if "v_row" in slots and slots["v_row"].shape == slots["v_col"].shape:
            turned = {**slots, "v_row": slots["v_col"], "v_col": slots["v_row"]}
            return replace(state, slots={**state.slots, path: turned}), f"slots/{path}/v_row"
    return None


def turned(values: Array) -> Array:
    """Transposes a square, else takes the elements in another order."""
    if values.ndim == 2 and values.shape[0] == values.shape[1]:
        return np.ascontiguousarray(values.T)
    return np.ascontiguousarray(values.reshape(values.shape[::-1]).T)


FAULTS: Mapping[str, Fault] = {
    "the slots of two parameters exchanged": exchanged_slots,
    "a slot's elements moved by one": changed(any_slot, rolled),
    "a slot transposed": changed(lambda s, p, n: len(s.slots[p][n].shape) > 1, turned),
    "an update too many counted": late,
    "row and column exchanged": rows_for_columns,
    "epsilon moved": option(("epsilon", "epsilon1", "eps"), lambda value: value * 10),
    "a decay of the moments moved": option(
        ("beta2", "decay_rate", "betas"), lambda v: [v[0], 0.9] if isinstance(v, list) else v * 0.99
    ),
    "the learning rate rewritten": option(("learning_rate", "lr"), lambda value: value * 10),
    "a moment rounded to bfloat16": changed(is_second_moment, in_bfloat16),
    "a second moment begun anew": changed(is_second_moment, np.zeros_like),
    "a second moment's root in its place": changed(is_second_moment, np.sqrt),
    "a second moment of another loss scale": changed(is_second_moment, lambda v: v * v.dtype.type(4)),
    "a second moment negative": changed(is_second_moment, np.negative),
    "momentum zeroed": changed(is_momentum, np.zeros_like),
    "momentum of the other sign": changed(is_momentum, np.negative),
    "a slot missing": missing_slot,
    "a parameter frozen": frozen,
    "a NaN in a slot": changed(any_slot, with_nan),
    "one bit of a slot": changed(any_slot, one_more_bit),
    "a parameter rounded to bfloat16": param_changed(in_bfloat16),
    "one bit of a parameter": param_changed(one_more_bit),
    "a parameter's elements moved by one": param_changed(rolled),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "part"),
    [  # each fault in every second family; the rest in the long run
        pytest.param(family, part, marks=[] if (i + part) % 2 == 0 else pytest.mark.slow)
        for i, family in enumerate(FAMILIES)
        for part in (0, 1)
    ],
)
def test_a_fault_is_refuted_and_named(family: str, part: int, folder: Path) -> None:
    source = source_of(family, folder)
    right = state_of(source, family)
    for number, (name, fault) in [*enumerate(FAULTS.items())][part::2]:
        made = fault(right)
        if made is None:
            continue
        place = folder / f"{family}-{number}"
        place.mkdir()
        target = written(made[0], place)
        try:
            verdict = verify(source, target, hints=FAMILIES[family].hints, steps=0).data["verdict"]
        except Exception as error:  # a file that makes no state is refused by name
            assert made[1] in str(error), f"{name}: {error}"
            continue
        assert verdict["whole"] == "refuted", name
        assert any(made[1] in one for one in verdict["because"]), f"{name}: {verdict['because'][:3]}"


@pytest.mark.parametrize("family", FAMILIES)
def test_most_faults_can_be_made_in_every_family(family: str, folder: Path) -> None:
    right = state_of(source_of(family, folder), family)
    assert sum(fault(right) is not None for fault in FAULTS.values()) >= 14


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_state_written_without_a_fault_is_not_refuted(family: str, folder: Path) -> None:
    source = source_of(family, folder)
    place = folder / f"{family}-right"
    place.mkdir()
    target = written(state_of(source, family), place)
    made = verify(source, target, hints=FAMILIES[family].hints, steps=1, gradients="random")
    assert made.passed, made.data["verdict"]["because"]
    assert set(made.tensors.values()) <= {"bit-exact", "within the rounding bound"}
