"""Keras' Muon: one class that moves matrices by Muon's rule, and all other variables by an Adam of its own.

    momentum   of every variable; m of the schema `muon`, and of `adamw`
    velocity   of those that its Adam moves: v of the schema `adamw`

A state has both as optimizers side by side, each with its groups. Which variables are its Adam's follows from the
slots; a target says it by `exclude_layers` and `exclude_embeddings`.

Source: keras-team/keras, keras/src/optimizers/muon.py, `Muon._should_use_adamw`, `build`, `_adamw_update_step`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from statekit.converters.layouts.hyperparameters import ManifestRecord
from statekit.converters.layouts.keras.native import ROWS, SCHEMA
from statekit.converters.layouts.keras.state import (
    ACCUMULATOR,
    AVERAGE,
    HOME,
    ITERATION,
    RATE,
    VARIANT,
    order_of,
)
from statekit.state.evidence import Fact
from statekit.state.schema import load_schema
from statekit.state.train_state import Group, KnownFrom, Optimizer, TrainState
from statekit.tensors.tensor import Tensor

CLASS = "Muon"
MATRICES, REST = ("muon", VARIANT), ("adamw", VARIANT)
"""Whose rule moves matrices, and whose all other variables."""
_RATIO, _EMBEDDINGS, _LAYERS = "adam_lr_ratio", "exclude_embeddings", "exclude_layers"
_RENAMED: Mapping[tuple[str, str], Mapping[str, str]] = {
    MATRICES: {"momentum": "m"},
    REST: {"momentum": "m", "velocity": "v"},
}
"""Canonical name of each slot by Keras' own."""
_ADAMS = {"adam_beta_1": "beta_1", "adam_beta_2": "beta_2", "adam_weight_decay": "weight_decay", "epsilon": "epsilon"}
"""The arguments of Muon that are its Adam's, each with what Adam itself calls it."""
_DECAY = "weight_decay_rate"


def is_of_its_class(state: TrainState) -> bool:
    """Tells whether one optimizer of the class may move all groups of a state."""
    return MATRICES in state.optimizer.kinds and {*state.optimizer.kinds} <= {MATRICES, REST}


def apart(state: TrainState, settings: Mapping[str, Any] | None, known: ManifestRecord | None) -> TrainState:
    """Returns the state of Muon and Adam, of one as Keras names its slots.

    Args:
        state: The state of the class, under Keras' own names.
        settings: The arguments of the class; None where no file has them.
        known: What a conversion's manifest says of both.
    """
    home = dict(state.extra[HOME])
    home.pop(ROWS)
    accumulated = {p: slots[ACCUMULATOR] for p, slots in state.slots.items() if ACCUMULATOR in slots}
    home |= {"gradient_accumulators": accumulated} if accumulated else {}
    rest = {path for path, slots in state.slots.items() if "velocity" in slots}
    if known is not None:
        groups, kinds = [group.group() for group in known.groups], [*known.kinds]
    else:
        rate = next((g.hyperparameters.get(RATE) for g in state.optimizer.groups), None)
        moved = [path for path in state.params if path in {*state.optimizer.paths}]
        parts = {
            MATRICES: tuple(path for path in moved if path not in rest),
            REST: tuple(path for path in moved if path in rest),
        }
        kinds = [kind for kind, paths in parts.items() if paths]
        groups = [_group(kind, parts[kind], settings, rate) for kind in kinds]
    slots = {
        path: {
            _RENAMED[REST].get(name, name): tensor for name, tensor in kept.items() if name != ACCUMULATOR
        }
        for path, kept in state.slots.items()
    }
    notes = [*state.assumptions, *(known.assumptions if known else _notes(settings, groups))]
    extra = {**state.extra, HOME: home}
    return replace(
        state, slots=slots, optimizer=Optimizer.of(groups, kinds), extra=extra, assumptions=tuple(notes)
    )


def _group(
    kind: tuple[str, str], paths: tuple[str, ...], settings: Mapping[str, Any] | None, rate: Any
) -> Group:
    """Returns a group with what the arguments of the class say of it."""
    schema = load_schema(kind[0])
    usual = schema.variant(VARIANT)["defaults"]
    said = dict(settings or {})
    ratio = said.get(_RATIO, 1) if kind == REST else 1
    if kind == REST:
        said = {**said, **{adams: said[name] for name, adams in _ADAMS.items() if name in said}}
    else:
        said.pop("epsilon", None)  # which is its Adam's
    values = {**usual, **schema.canonical(VARIANT, said)}
    origin: KnownFrom = "assumed" if settings is None else "file"
    values.pop(RATE, None)
    origins: dict[str, KnownFrom] = dict.fromkeys(values, origin)
    if rate is not None:
        values[RATE], origins[RATE] = rate * ratio, origin if ratio != 1 else "file"
    scheduled = Fact(RATE, because=f"{_RATIO} multiplies the schedule's rate by {ratio:g}")
    return Group(paths, values, origins, facts=(scheduled,) if rate is None and ratio != 1 else ())


def _notes(settings: Mapping[str, Any] | None, groups: Sequence[Group]) -> list[str]:
    if settings is None:
        named = {name: value for g in groups for name, value in g.hyperparameters.items() if name != RATE}
        assumed = ", ".join(f"{name}={value}" for name, value in named.items())
        return [f"The file holds no config; assumed: {assumed}."]
    if any(group.hyperparameters.get(_DECAY) for group in groups):
        return ["No file of Keras says what is kept from weight decay; assumed: nothing is."]
    return []


def together(state: TrainState, home: Mapping[str, Any]) -> TrainState:
    """Returns the state of the class, as Keras names and orders its slots; undoes `apart`."""
    order, accumulated = order_of(state), home.get("gradient_accumulators", {})
    kind_of = {path: state.optimizer.kind(group) for group in state.optimizer.groups for path in group.paths}
    natives = {kind: {name: own for own, name in names.items()} for kind, names in _RENAMED.items()}
    slots: dict[str, dict[str, Tensor]] = {}
    for path in order:
        names = natives[kind_of[path]]  # type: ignore[index]  # `is_of_its_class` told that it has a variant
        slots[path] = {names.get(name, name): tensor for name, tensor in state.slots.get(path, {}).items()}
        slots[path] |= {ACCUMULATOR: accumulated[path]} if path in accumulated else {}
    rates = [group.hyperparameters.get(RATE) for group in state.optimizer.groups]
    has_rate = rates[0] is not None or not home.get("schedule")
    rows = [["", ITERATION], *([["", RATE]] if has_rate else [])]
    for name in (AVERAGE, ACCUMULATOR):
        rows += [[path, name] for path in order if name in slots[path]]
    rows += [[path, own] for path in order for own in _RENAMED[REST] if own in slots[path]]
    values = dict(next(g.hyperparameters for g in state.optimizer.groups if state.optimizer.kind(g) == MATRICES))
    group = Group(tuple(order), values, dict.fromkeys(values, "file"))
    extra = {**state.extra, HOME: {**home, ROWS: rows}}
    return replace(state, slots=slots, optimizer=Optimizer(SCHEMA, CLASS, (group,)), rules={}, extra=extra)


def arguments(groups: Sequence[tuple[tuple[str, str | None], Mapping[str, Any], Sequence[str]]]) -> dict[str, Any]:
    """Returns the arguments of the class for the groups of a state.

    Args:
        groups: Of each, whose rule moves it, its hyperparameters and its paths; shapes don't matter, as a path that
            `exclude_layers` names needs no other reason.
    """
    values = {kind: hyper for kind, hyper, _ in groups}
    said = load_schema(MATRICES[0]).native(VARIANT, dict(values[MATRICES]))
    said.pop("exclude_from_weight_decay", None)
    if REST in values:
        adams = load_schema(REST[0]).native(VARIANT, dict(values[REST]))
        said |= {name: adams[own] for name, own in _ADAMS.items() if own in adams}
        rates = values[MATRICES].get(RATE), values[REST].get(RATE)
        if rates[0] and rates[1] is not None:
            said[_RATIO] = rates[1] / rates[0]
    matrices = [path for kind, _, paths in groups if kind == MATRICES for path in paths]
    others = [path for kind, _, paths in groups if kind != MATRICES for path in paths]
    spares = not any("embedding" in path.lower() for path in matrices)
    named = [path for path in others if not (spares and "embedding" in path.lower())]
    return {**said, _EMBEDDINGS: spares, _LAYERS: [f"{re.escape(path)}$" for path in named]}
