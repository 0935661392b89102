"""Keras' Muon: one class that moves matrices by Muon's rule, and all other variables by an Adam of its own.

    momentum   of every variable; m of the schema `muon`, and of `adamw`
    velocity   of those that its Adam moves: v of the schema `adamw`

A state has both optimizers side by side, each with its groups. The slots tell which variables Adam moves; a target
names them by `exclude_layers` and `exclude_embeddings`. Adam's rate is `adam_lr_ratio` times Muon's, but Keras
multiplies Adam's decay by Muon's rate: its weight decay in the schema is `adam_weight_decay / adam_lr_ratio`.

Source: keras-team/keras, keras/src/optimizers/muon.py, `Muon._should_use_adamw`, `build`, `update_step`,
`_apply_weight_decay`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.converters.layouts.hyperparameters import ManifestRecord, manifest_state
from statekit.converters.layouts.keras.native import ROWS, SCHEMA, Signature, native_state
from statekit.converters.layouts.keras.state import (
    ACCUMULATOR,
    AVERAGE,
    HOME,
    ITERATION,
    RATE,
    VARIANT,
    order_of,
)
from statekit.files.checkpoint import Checkpoint
from statekit.state.evidence import Fact
from statekit.state.schema import load_schema
from statekit.state.train_state import Group, Kind, KnownFrom, Optimizer, TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.typed import fits

CLASS = "Muon"
MATRICES: Kind = ("muon", VARIANT)
REST: Kind = ("adamw", VARIANT)
"""Whose rule moves matrices, and whose all other variables."""
_RATIO, _EMBEDDINGS, _LAYERS = "adam_lr_ratio", "exclude_embeddings", "exclude_layers"
_RENAMED: Mapping[str, str] = {"momentum": "m", "velocity": "v"}
"""Canonical name of each slot by Keras' own."""
_NATIVE = {name: native for native, name in _RENAMED.items()}
_ADAMS = {
    "adam_beta_1": "beta_1",
    "adam_beta_2": "beta_2",
    "adam_weight_decay": "weight_decay",
    "epsilon": "epsilon",
}
"""The arguments of Muon that are its Adam's, each with what Adam itself calls it."""
BY_RATIO = (_RATIO, "adam_weight_decay")
"""The arguments that say nothing by themselves while the ratio of the rates isn't known."""
_DECAY = "weight_decay_rate"


def is_of_its_class(state: TrainState) -> bool:
    """Tells whether one optimizer of the class may move all groups of a state."""
    return MATRICES in state.optimizer.kinds and {*state.optimizer.kinds} <= {MATRICES, REST}


def apart(state: TrainState, settings: Mapping[str, Any] | None, record: ManifestRecord | None) -> TrainState:
    """Returns the state of Muon and Adam, of one as Keras names its slots.

    Args:
        state: The state of the class, under Keras' own names.
        settings: The arguments of the class; None where no file has them.
        record: What a conversion's manifest says of both.
    """
    home = dict(state.extra[HOME])
    accumulated = {p: slots[ACCUMULATOR] for p, slots in state.slots.items() if ACCUMULATOR in slots}
    home |= {"gradient_accumulators": accumulated} if accumulated else {}
    home |= {} if ["", RATE] in home[ROWS] else {"schedule": True}
    if record is not None:
        groups, kinds = [group.group() for group in record.groups], list[Kind](record.kinds)
    else:
        groups, kinds = _groups(state, settings)
    slots = {
        path: {_RENAMED.get(name, name): tensor for name, tensor in kept.items() if name != ACCUMULATOR}
        for path, kept in state.slots.items()
    }
    notes = [*state.assumptions, *(record.assumptions if record else _notes(settings, groups))]
    extra = {**state.extra, HOME: home}
    return replace(
        state, slots=slots, optimizer=Optimizer.of(groups, kinds), extra=extra, assumptions=tuple(notes)
    )


def _groups(state: TrainState, settings: Mapping[str, Any] | None) -> tuple[list[Group], list[Kind]]:
    """Returns the groups that have parameters, of Muon's and of Adam's, and whose rule moves each."""
    rate = next((g.hyperparameters.get(RATE) for g in state.optimizer.groups), None)
    paths = {*state.optimizer.paths}
    moved = [path for path in state.params if path in paths]
    adams = {path for path in moved if "velocity" in state.slots[path]}
    parts = {
        MATRICES: tuple(path for path in moved if path not in adams),
        REST: tuple(path for path in moved if path in adams),
    }
    kinds = [kind for kind in parts if parts[kind]]
    return [_group(kind, parts[kind], settings, rate) for kind in kinds], kinds


def _group(kind: Kind, paths: tuple[str, ...], settings: Mapping[str, Any] | None, rate: Any) -> Group:
    """Returns a group with its hyperparameters, as the arguments of the class give them."""
    schema = load_schema(kind[0])
    usual = schema.variant(VARIANT)["defaults"]
    arguments = dict(settings or {})
    ratio = arguments.get(_RATIO, 1) if kind == REST else 1
    if kind == REST:
        arguments |= {adams: arguments[name] for name, adams in _ADAMS.items() if name in arguments}
    else:
        arguments.pop("epsilon", None)  # which is its Adam's
    values = {**usual, **schema.canonical(VARIANT, arguments)}
    if fits(values[_DECAY], float):  # what is no number is the schema's to refuse
        values[_DECAY] /= ratio
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
        return [f"The file holds no config; assumed: {assumed}.", f"Taken for a run with {_RATIO}=1."]
    if any(group.hyperparameters.get(_DECAY) for group in groups):
        return ["No file of Keras says what is kept from weight decay; assumed: nothing is."]
    return []


def together(state: TrainState, home: Mapping[str, Any]) -> TrainState:
    """Returns the state of the class, as Keras names and orders its slots; undoes `apart`."""
    order, accumulated = order_of(state), home.get("gradient_accumulators", {})
    slots: dict[str, dict[str, Tensor]] = {}
    for path in order:
        slots[path] = {_NATIVE.get(name, name): tensor for name, tensor in state.slots.get(path, {}).items()}
        slots[path] |= {ACCUMULATOR: accumulated[path]} if path in accumulated else {}
    rates = [group.hyperparameters.get(RATE) for group in state.optimizer.groups]
    has_rate = rates[0] is not None or not home.get("schedule")
    rows = [["", ITERATION], *([["", RATE]] if has_rate else [])]
    for name in (AVERAGE, ACCUMULATOR):
        rows += [[path, name] for path in order if name in slots[path]]
    rows += [[path, name] for path in order for name in _RENAMED if name in slots[path]]
    values = dict(
        next(g.hyperparameters for g in state.optimizer.groups if state.optimizer.kind(g) == MATRICES)
    )
    group = Group(tuple(order), values, dict.fromkeys(values, "file"))
    extra = {**state.extra, HOME: {**home, ROWS: rows}}
    return replace(state, slots=slots, optimizer=Optimizer(SCHEMA, CLASS, (group,)), rules={}, extra=extra)


Part: TypeAlias = tuple[Kind, Mapping[str, Any], Sequence[str]]
"""Of a group: whose rule moves it, its hyperparameters, and its paths."""


def parts_of(optimizer: Optimizer) -> list[Part]:
    """Returns the groups of a state, as `arguments` takes them."""
    return [(optimizer.kind(group), group.hyperparameters, group.paths) for group in optimizer.groups]


def class_arguments(state: TrainState, home: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the class for a state: those that a file had, with the state's values over them."""
    options = arguments(parts_of(state.optimizer), float(config.get(_RATIO, 1)))
    before = {path for path, slot in home.get(ROWS, ()) if slot == "velocity"}
    rest = {path for kind, _, paths in parts_of(state.optimizer) if kind == REST for path in paths}
    if config and before == rest:
        del options[_EMBEDDINGS], options[_LAYERS]
    options = {"name": "muon", **options} if not config else options
    return {**config, **{name: value for name, value in options.items() if value != config.get(name, name)}}


def arguments(parts: Sequence[Part], ratio: float = 1) -> dict[str, Any]:
    """Returns the arguments of the class for the groups of a state.

    `exclude_layers` names each path that is Adam's; shapes don't matter, as such a path needs no other reason.
    """
    values = {kind: hyper for kind, hyper, _ in parts}
    options = load_schema(MATRICES[0]).native(VARIANT, dict(values[MATRICES]))
    options.pop("exclude_from_weight_decay", None)
    if REST in values:
        adams = load_schema(REST[0]).native(VARIANT, dict(values[REST]))
        options |= {name: adams[adams_name] for name, adams_name in _ADAMS.items() if adams_name in adams}
        rate, adams_rate = values[MATRICES].get(RATE), values[REST].get(RATE)
        if rate and adams_rate:
            ratio = _short(adams_rate / rate, lambda short: short * rate == adams_rate)
        options[_RATIO] = ratio
        if decay := values[REST].get(_DECAY):
            options["adam_weight_decay"] = _short(decay * ratio, lambda short: short / ratio == decay)
    return options | _excluded(parts)


def _excluded(parts: Sequence[Part]) -> dict[str, Any]:
    """Returns the arguments that give all paths of Adam's to it, and none of Muon's."""
    matrices = [path for kind, _, paths in parts if kind == MATRICES for path in paths]
    others = [path for kind, _, paths in parts if kind != MATRICES for path in paths]
    spares = not any("embedding" in path.lower() for path in matrices)
    named = [path for path in others if not (spares and "embedding" in path.lower())]
    backwards = sorted(map(_backwards, matrices))
    return {_EMBEDDINGS: spares, _LAYERS: [_pattern(path, backwards) for path in named]}


def _backwards(path: str) -> str:
    """Returns a path from its end to its begin: paths with one end then stand together in their order."""
    return f"/{path}"[::-1]


def _pattern(path: str, backwards: Sequence[str]) -> str:
    """Returns a regex that finds a variable by the end of its path: a model that is loaded may have another name.

    Example:
        >>> _pattern("net/head/kernel", [_backwards("net/up/kernel")])
        '(^|/)head/kernel$'
    """
    keys = path.split("/")
    ends = ("/".join(keys[-count:]) for count in range(2, len(keys)))
    end = next((end for end in ends if not _is_an_end(end, backwards)), path)
    return f"(^|/){re.escape(end)}$"


def _is_an_end(end: str, backwards: Sequence[str]) -> bool:
    """Tells whether one of some paths has an end; they are given backwards, in their order."""
    begin = _backwards(end)
    at = bisect_left(backwards, begin)
    return at < len(backwards) and backwards[at].startswith(begin)


def usual_arguments() -> dict[str, Any]:
    """Returns the arguments of the class that it has by itself."""
    usual = {kind: load_schema(kind[0]).variant(VARIANT)["defaults"] for kind in (MATRICES, REST)}
    return arguments([(kind, values, ()) for kind, values in usual.items()])


def _short(value: float, is_it: Callable[[float], bool]) -> float:
    """Returns the shortest number near a value that fits to the bit, as a user wrote it."""
    near = (float(f"{value:.{digits}g}") for digits in range(1, 17))
    return next(filter(is_it, near), value)


def class_state(
    signature: Signature,
    rows: Sequence[tuple[str | None, str, Tensor]],
    params: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    home: Mapping[str, Any],
    checkpoint: Checkpoint,
    hints: CheckpointRef,
    notes: Sequence[str] = (),
) -> TrainState:
    """Returns the state of an optimizer as its class has it, with the user's hints in force; Muon's by its two rules.

    Args:
        signature: Its class.
        rows: Its variables, as `native_state` takes them.
        params: The parameters that it moves, and those that it doesn't.
        home: What a file of this kind holds besides.
        checkpoint: The checkpoint, whose manifest may say more.
        hints: What the user says.
        notes: What was assumed.

    Raises:
        StateError: The optimizer doesn't count its calls.
    """
    manifest = manifest_state(checkpoint, SCHEMA)
    state = native_state(signature, rows, *params, home, manifest, hints, notes)
    ratio = (signature.settings or {}).get(_RATIO, 1)
    if signature.kind == CLASS and _divides(ratio):
        both = manifest_state(checkpoint, MATRICES[0], REST[0]) or manifest_state(checkpoint, MATRICES[0])
        recorded = manifest.groups[0].hyperparameters.values if manifest and manifest.groups else None
        state = apart(state, signature.settings or recorded, both)
    return hints.applied(state)


def _divides(ratio: Any) -> bool:
    """Tells whether the arguments of Adam may be divided by a ratio: Adam of rate 0 would still decay."""
    return fits(ratio, float) and ratio > 0 and math.isfinite(ratio) and math.isfinite(1 / ratio)
