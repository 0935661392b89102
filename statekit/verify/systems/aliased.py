"""What most systems' recordings have in common: each slot is one tensor of its own, under a name that the schema gives.

A phase's hyperparameters then are, beside the system's own arguments in `groups`:

    schema, variant     which rule ran
    groups              [{"params": [path, ...], <argument>: <value>, ...}, ...]
    slots               canonical slot -> its name in the recording, where that isn't just the schema's alias
    dimension_names     path -> names of its axes, where some are kept out of factoring by name
    counts              {"slots": [name, ...], "globals": [name, ...], "dtype": dtype}: what holds the count of updates
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from statekit.errors import FormatError, NotFoundError, StateError, fault_list
from statekit.optim.factoring import by_shape
from statekit.optim.run import initial
from statekit.optim.steps import Execution
from statekit.schema import OptimizerSchema, load_schema
from statekit.state import Counts, Group, Optimizer, Rule, TrainState
from statekit.tensor import DTYPES, Tensor, in_memory
from statekit.verify.phases import FORMAT, TRAJECTORY, Phase


def kind(meta: Mapping[str, Any], kinds: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Returns schema and variant of a recorded optimizer, by a word in its name.

    Raises:
        NotFoundError: No word of `kinds` is in it.
    """
    found = next((names for word, names in kinds.items() if word in str(meta["optimizer"])), None)
    if found is None:
        raise NotFoundError(
            "statekit can't replay this system's optimizer yet.",
            expected=", ".join(kinds),
            found=meta["optimizer"],
        )
    return found


def described(
    meta: Mapping[str, Any],
    phases: Sequence[tuple[int, int, Mapping[str, Any]]],
    checkpoint: str,
    execution: Execution,
    *,
    first: int = 0,
    own_rate: bool = False,
    **trajectory: Any,
) -> dict[str, Any]:
    """Returns the content of `recording.json` for a system's `meta.json`, which counts updates from 1.

    Args:
        meta: The content of `meta.json`.
        phases: First update, last update, hyperparameters.
        checkpoint: The native checkpoint, relative to the folder.
        execution: How the original ran.
        first: Updates that the optimizer counts as done before the first one.
        own_rate: Whether the optimizer computes its learning rate, so that what `meta.json` says is its result.
        trajectory: What else there is to say of the trajectory, as `Trajectory` has it.
    """
    steps, rates = int(meta["steps"]), list(meta["learning_rate"])
    return {
        "format": FORMAT,
        "version": 1,
        "system": meta["system"],
        "steps": [first, first + steps],
        "numbered_from": 0,
        "phases": [
            {"updates": [first + begin, first + end], "hyperparameters": dict(told)}
            for begin, end, told in phases
        ],
        "learning_rate": [None] * steps if own_rate else rates,
        "trajectories": [{"file": TRAJECTORY, "execution": execution, **trajectory}],
        "checkpoint": {"path": checkpoint, "step": first + int(meta["checkpoint_step"])},
    }


def canonical(schema: OptimizerSchema, variant: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns hyperparameters in canonical names, from a system's own arguments or from canonical ones.

    Example:
        >>> canonical(load_schema("adamw"), "torch", {"betas": [0.9, 0.95], "eps": 1e-08, "foreach": None})
        {'beta1': 0.9, 'beta2': 0.95, 'epsilon': 1e-08}
    """
    found = {}
    for name in schema.variant(variant)["defaults"]:
        spelling = schema.hyperparameters[name]["native"].get(variant, {})
        own = name if "note" in spelling else str(spelling.get("name", name))
        argument, _, index = own.rstrip("]").partition("[")
        if argument in arguments:
            value = arguments[argument][int(index)] if index else arguments[argument]
            found[name] = -value if "sign" in spelling and value is not None else value
        elif name in arguments:
            found[name] = arguments[name]
    return found


def aliases(schema: OptimizerSchema, variant: str, names: Mapping[str, str]) -> dict[str, str]:
    """Returns canonical slot -> name in the recording."""
    known = {name: slot.aliases[variant] for name, slot in schema.slots.items() if variant in slot.aliases}
    return {**known, **names}


def decode(tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
    """Returns the canonical state of one step.

    Raises:
        FormatError: A tensor has no place in it, or a parameter is missing.
        StateError: Parameters don't all count the same updates.
    """
    told = phase.hyperparameters
    schema, variant, counts = load_schema(told["schema"]), told["variant"], told.get("counts", {})
    canonical_of = {native: name for name, native in aliases(schema, variant, told.get("slots", {})).items()}
    groups = tuple(_group(schema, variant, group) for group in told["groups"])
    params = {name[len("param/") :]: t for name, t in tensors.items() if name.startswith("param/")}
    faults = [
        ("is in a group and not recorded", p) for group in groups for p in group.paths if p not in params
    ]
    ordered = {path: params[path] for group in groups for path in group.paths if path in params}
    slots: dict[str, dict[str, Tensor]] = {path: {} for path in {**ordered, **params}}
    for name, tensor in tensors.items():
        sort, _, rest = name.partition("/")
        path, _, native = rest.rpartition("/")
        if sort == "slot" and path in slots and native in canonical_of:
            slots[path][canonical_of[native]] = tensor
        elif sort != "param" and not _counts_updates(name, counts):
            faults.append(("has no place in a canonical state", name))
    if faults:
        raise FormatError(f"A recording doesn't hold a state of {schema.name}.", found=fault_list(faults))
    _check_counts(tensors, counts, step + _base(groups))
    state = TrainState(
        {**ordered, **params},
        slots,
        Optimizer(schema.name, variant, groups),
        Counts(step, step),
        dict(_rules(schema, variant, ordered, groups, told.get("dimension_names", {}))),
    )
    # Where slots are born in the first update, state 0 has none: they begin as they would.
    return initial(state) if _unborn(state) else state


def _group(schema: OptimizerSchema, variant: str, arguments: Mapping[str, Any]) -> Group:
    values = canonical(schema, variant, arguments)
    return Group(tuple(arguments["params"]), values, dict.fromkeys(values, "file"))


def _rules(
    schema: OptimizerSchema,
    variant: str,
    params: Mapping[str, Tensor],
    groups: Sequence[Group],
    dimension_names: Mapping[str, Sequence[str]],
) -> Iterator[tuple[str, Rule]]:
    """Yields how the variant factors each parameter, if its optimizer factors at all."""
    if "v_row" not in schema.slots:
        return
    form, settings = schema.variant(variant)["constants"], schema.settings(variant)
    for group in groups:
        said = {**settings, **group.hyperparameters}
        apart = said["stacked_dim_names"] or ()
        for path in group.paths:
            stacked = [i for i, name in enumerate(dimension_names.get(path, ())) if name in apart]
            minimum = said["min_dim_size_to_factor"]
            axes = by_shape(form, params[path].shape, said["factored"], minimum, stacked)
            yield path, Rule(axes, "file")


def _unborn(state: TrainState) -> bool:
    return state.counts.updates == 0 and _constants(state).get("slots_created") == "first_gradient"


def _constants(state: TrainState) -> Mapping[str, Any]:
    schema = load_schema(state.optimizer.schema)
    constants: Mapping[str, Any] = schema.variant(str(state.optimizer.variant))["constants"]
    return constants


def _base(groups: Sequence[Group]) -> int:
    return int(groups[0].hyperparameters.get("begin_num_update", 0)) if groups else 0


def _counts_updates(name: str, counts: Mapping[str, Any]) -> bool:
    sort, _, rest = name.partition("/")
    if sort == "global":
        return rest in counts.get("globals", ())
    return sort == "slot" and rest.rpartition("/")[2] in counts.get("slots", ())


def _check_counts(tensors: Mapping[str, Tensor], counts: Mapping[str, Any], expected: int) -> None:
    held = {name: int(t.read()) for name, t in tensors.items() if _counts_updates(name, counts)}
    other = next((name for name, count in held.items() if count != expected), None)
    if other is not None:
        raise StateError(
            "Not everything in a recording counts the same updates; statekit steps a run with one count.",
            place=other,
            expected=expected,
            found=held[other],
        )


def encode(state: TrainState, phase: Phase) -> dict[str, Tensor]:
    """Returns the tensors of a state under the trajectory's names, without the step."""
    told, variant = phase.hyperparameters, str(state.optimizer.variant)
    named = {f"param/{path}": tensor for path, tensor in state.params.items()}
    counts = dict(_counts(state, told.get("counts", {})))
    if _unborn(state):
        return named
    native = aliases(load_schema(state.optimizer.schema), variant, told.get("slots", {}))
    slots = {
        f"slot/{path}/{native[name]}": tensor
        for path, own in state.slots.items()
        for name, tensor in own.items()
    }
    return named | slots | counts


def _counts(state: TrainState, counts: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    if counts:
        value = state.counts.updates + _base(state.optimizer.groups)
        count = in_memory(np.asarray(value, DTYPES[counts["dtype"]]), "count")
        yield from ((f"global/{name}", count) for name in counts.get("globals", ()))
        for path in state.slots:
            yield from ((f"slot/{path}/{name}", count) for name in counts.get("slots", ()))


@dataclass(frozen=True)
class Aliased:
    """A system whose recordings hold slots under the schema's aliases.

    Attributes:
        description: Brings `meta.json` into the documented form, given the folder and its content.
    """

    description: Callable[[Path, Mapping[str, Any]], dict[str, Any]]

    def describe(self, folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of `recording.json` for a folder that has the system's own `meta.json`."""
        return self.description(folder, meta)

    def decode(self, tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
        """Returns the canonical state of one step."""
        return decode(tensors, step, phase)

    def encode(self, state: TrainState, phase: Phase) -> dict[str, Tensor]:
        """Returns the tensors of a state under the trajectory's names, without the step."""
        return encode(state, phase)
