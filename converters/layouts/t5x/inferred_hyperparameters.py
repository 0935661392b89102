"""The hyperparameters of a T5X run: given, found in a gin file or manifest, inferred from the slots, or assumed.

T5X stores none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.converters.layouts.hyperparameters import (
    Hyperparameters,
    ManifestRecord,
    OptimizerSpec,
    with_minimum,
)
from statekit.converters.layouts.t5x.tree import NativeSlots
from statekit.errors import Faults, UsageError
from statekit.files.checkpoint import Checkpoint
from statekit.state.factoring import first_entry, map_entries
from statekit.state.options import checked_hparams, read_hparams
from statekit.state.schema import load_schema
from statekit.tensors.tensor import Shape

RULES = ("factor_map", "logical_factor_rules", "logical_axes")
"""Hyperparameters that say how parameters are factored; they become rules."""

_T5X = ("adafactor", "t5x")
"""Schema and variant."""
STANDARD = {
    "vocab": "COLUMN", "embed": "ROW", "mlp": "COLUMN", "heads": "COLUMN", "kv": "COLUMN", "joined_kv": "COLUMN",
    "relpos_buckets": "NONE", "layers": "BATCH", "stack": "BATCH", "q_wi_fused": "COLUMN", "o_wo_fused": "COLUMN",
    "multiquery_heads": "COLUMN", "kv_fused": "COLUMN", "layer_norm_scale": "NONE", "mlp_activations": "COLUMN",
}  # fmt: skip
"""What T5X's `standard_logical_factor_rules()` returns: label by logical axis. Source: T5X t5x/adafactor.py."""

_STANDARD = "standard_logical_factor_rules()"
_NAMED_STANDARD = re.compile(r"@?(\w+\.)*standard_logical_factor_rules(\(\))?")
_TRAVERSALS = "traversals_and_optimizers"


def defaults() -> dict[str, Any]:
    """Returns T5X's defaults. Source: T5X t5x/adafactor.py, `Adafactor.__init__`."""
    return dict(load_schema("adafactor").variants["t5x"]["defaults"])


def members(
    checkpoint: Checkpoint,
    hints: CheckpointRef,
    known: ManifestRecord | None,
    slots_by_path: Mapping[str, NativeSlots | None],
) -> tuple[list[OptimizerSpec], list[str]]:
    """Sorts the moved parameters by optimizer: as traversals or the manifest say, else by whether they have momentum.

    Returns:
        The members, each with what is told about it: by the user, by the manifest, by a gin file. What is open.

    Raises:
        UsageError: The user's hyperparameters can't be, or the traversals don't select exactly the parameters that
            have slots; lists every one.
    """
    given = checked_hparams(*_T5X, hints.hyperparameters, only=defaults(), unchecked=(*RULES, _TRAVERSALS))
    gin, notes = _from_gin(checkpoint)
    if _TRAVERSALS in given:
        traversals = given.pop(_TRAVERSALS)
        return _traversed(traversals, gin.over(given, "given"), slots_by_path), notes
    if known is not None:
        moved = [
            replace(g, paths=tuple(p for p in g.paths if slots_by_path.get(p) is not None))
            for g in known.groups
        ]
        return [
            replace(g, hyperparameters=gin.under(g.hyperparameters).over(given, "given")) for g in moved
        ], notes
    specified = gin.over(given, "given")
    momentum = {path: slots.momentum for path, slots in slots_by_path.items() if slots is not None}
    parts = [tuple(momentum)]
    if {True, False} <= set(momentum.values()):
        parts = [tuple(p for p in momentum if momentum[p]), tuple(p for p in momentum if not momentum[p])]
        notes.append(
            "Some parameters have momentum and others don't: they are taken for two optimizers' parameters."
        )
    elif None in slots_by_path.values():
        notes.append(
            "Which optimizer moved a parameter isn't stored; all that have slots are taken to share one."
        )
    return [OptimizerSpec(paths, specified) for paths in parts if paths], notes


def _from_gin(checkpoint: Checkpoint) -> tuple[Hyperparameters, list[str]]:
    """Returns what the run's gin file says, and what of it can't be used."""
    gin = checkpoint.meta.get("gin") or {}
    values, references = dict(gin.get("values", {})), gin.get("references", {})
    notes = [note for note in gin.get("left_out", ()) if _STANDARD not in note]
    if _STANDARD in references.get("logical_factor_rules", ""):
        values["logical_factor_rules"] = STANDARD
    options = read_hparams(*_T5X, values, only=defaults(), unchecked=RULES)
    notes += [
        f"{name}={values[name]!r} in {gin['file']} isn't used: it {fault}." for fault, name in options.faults
    ]
    return Hyperparameters().over(options.values, "file"), notes


def logical_rules(value: Any) -> Any:
    """Returns `logical_factor_rules`, T5X's own table where it is called by its function."""
    return STANDARD if isinstance(value, str) and _NAMED_STANDARD.fullmatch(value) else value


def _traversed(
    traversals: Any, specified: Hyperparameters, slots_by_path: Mapping[str, NativeSlots | None]
) -> list[OptimizerSpec]:
    entries = list(_entries(traversals))
    owners = {
        path: [i for i, (regex, _) in enumerate(entries) if re.search(regex, path)] for path in slots_by_path
    }
    faults = [f"{path} is selected {len(owning)} times" for path, owning in owners.items() if len(owning) > 1]
    faults += [
        f"{path} is selected but has no slots"
        for path, owning in owners.items()
        if owning and slots_by_path[path] is None
    ]
    faults += [
        f"{path} has slots but isn't selected"
        for path, owning in owners.items()
        if not owning and slots_by_path[path]
    ]
    if faults:
        raise UsageError(f"{_TRAVERSALS} doesn't fit the checkpoint.", found="; ".join(faults)[:2000])
    return [
        OptimizerSpec(
            tuple(path for path, owning in owners.items() if owning == [i]), specified.over(values, "given")
        )
        for i, (_, values) in enumerate(entries)
    ]


def _entries(traversals: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for entry in traversals if isinstance(traversals, Sequence) else [traversals]:
        fields: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
        regex, values = fields.get("path_regex_search"), fields.get("hyperparameters", {})
        try:
            if not isinstance(regex, str):
                raise TypeError
            re.compile(regex)
        except (re.error, TypeError, RecursionError) as error:
            raise UsageError(
                f"{_TRAVERSALS} has another form.",
                expected='[{"path_regex_search": "kernel$", "hyperparameters": {...}}, ...]',
                found=repr(entry)[:200],
            ) from error
        if not isinstance(values, dict):
            raise UsageError(
                f"{_TRAVERSALS} has hyperparameters that aren't a map.", found=repr(values)[:200]
            )
        yield regex, checked_hparams(*_T5X, values, only=defaults(), unchecked=RULES)


def inferred(
    all_slots: Sequence[NativeSlots], by_size: Sequence[NativeSlots], specified: Hyperparameters
) -> tuple[Hyperparameters, list[str]]:
    """Returns T5X's defaults as corrected by what the slots of one optimizer's parameters prove, and what is open.

    Args:
        all_slots: Slots of all its parameters.
        by_size: Of them the matrices that have no rule of their own.
        specified: What is known already.
    """
    notes = []
    hyperparameters = Hyperparameters().over(defaults(), "assumed")
    full = [slots for slots in all_slots if slots.momentum]
    if full:
        hyperparameters = hyperparameters.over({"dtype_momentum": full[0].momentum_dtype.name}, "file")
    elif any(slots.momentum is False for slots in all_slots):
        hyperparameters = hyperparameters.over({"beta1": None}, "file")
    if any(slots.factored for slots in all_slots):
        hyperparameters = hyperparameters.over({"factored": True}, "file")
    elif not any(map(specified.is_known, RULES)) and any(
        _factors(slots.shape, hyperparameters.values) for slots in all_slots
    ):
        hyperparameters = hyperparameters.over({"factored": False}, "assumed")
    if hyperparameters.values["factored"] and not specified.is_known("min_dim_size_to_factor"):
        yes = [min(slots.shape) for slots in by_size if slots.factored]
        hyperparameters, note = with_minimum(
            hyperparameters, yes, [min(slots.shape) for slots in by_size if not slots.factored]
        )
        notes += note
    values = dict(hyperparameters.values)
    if full:
        del values["beta1"]
    return Hyperparameters(values, {name: hyperparameters.known_from[name] for name in values}), notes


def _factors(shape: Shape, values: Mapping[str, Any]) -> bool:
    """Tells whether T5X, left to its defaults, would have factored a parameter, or stopped at it."""
    return len(shape) > 2 or (len(shape) == 2 and min(shape) >= values["min_dim_size_to_factor"])


def scale_by_path(value: Any, paths: Sequence[str], faults: Faults) -> Any:
    """Resolves multiply_by_parameter_scale to a bool, or to one for each path."""
    if isinstance(value, bool):
        return value
    entries = map_entries(value, "multiply_by_parameter_scale")
    scales: dict[str, bool] = {}
    for path in paths:
        entry = first_entry(entries, path)
        if entry is None or not isinstance(entry.value, bool):
            faults.add("multiply_by_parameter_scale has no true or false for it", path)
        else:
            scales[path] = entry.value
    return scales
