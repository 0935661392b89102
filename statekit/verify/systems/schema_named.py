"""What most systems' recordings have in common: each slot is one tensor of its own, under a name that the schema gives.

A phase's hyperparameters then are, beside the system's own arguments in `groups`:

    schema, variant     which rule ran; of several optimizers side by side each group says its own
    groups              [{"params": [path, ...], <argument>: <value>, ...}, ...]
    dimension_names     path -> names of its axes, where some are kept out of factoring by name
    rules               path -> ROW, COLUMN, BATCH or NONE for each axis, where the shape alone doesn't say
    counts              {"slots": [name, ...], "dtype": dtype}: which tensors the recorder wrote an updates' count to
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from statekit.errors import Faults, FormatError, NotFoundError, StateError, UnknownRuleError
from statekit.optim.run import initial
from statekit.optim.steps import Execution
from statekit.state.constants import variant_constants
from statekit.state.factoring import by_shape
from statekit.state.hyperparameters import alike
from statekit.state.options import RATE_NAMES
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.state.stored_params import EIGHTH_POWER, ENCODING
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Tensor
from statekit.verify.contract import FORMAT, TRAJECTORY, Phase
from statekit.verify.systems import other_tensors
from statekit.verify.systems.native_slots import canonical_slots, native_slots


def kind(meta: Mapping[str, Any], kinds: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """Returns schema and variant of a recorded optimizer, by a word in its name.

    Raises:
        NotFoundError: No word of `kinds` is in it.
        UnknownRuleError: Words of several optimizers are.
    """
    named = [names for word, names in kinds.items() if word in str(meta["optimizer"])]
    several = Faults(
        ("names it, and not what it moves", schema) for schema in dict.fromkeys(s for s, _ in named)
    )
    if len(several) > 1:
        several.check(
            UnknownRuleError,
            "A recording is of several optimizers side by side",
            place=meta["optimizer"],
            remedy="say in every group of extra.param_groups which optimizer moves it (docs/recordings.md)",
        )
    if not named:
        raise NotFoundError(
            "statekit can't replay this system's optimizer yet.",
            expected=", ".join(kinds),
            found=meta["optimizer"],
        )
    return named[0]


def checkpoint_of(files: Sequence[str]) -> str:
    """Returns what is opened as a checkpoint: its only file, or the folder of its first."""
    return files[0] if len(files) == 1 else posixpath.dirname(files[0])


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
            {"updates": [first + begin, first + end], "hyperparameters": dict(spec)}
            for begin, end, spec in phases
        ],
        "learning_rate": [None] * steps if own_rate else rates,
        "trajectories": [{"file": TRAJECTORY, "execution": execution, **trajectory}],
        "checkpoint": {"path": checkpoint, "step": first + int(meta["checkpoint_step"])},
    }


def kinds_of(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns whose rule moves each group: its own schema and variant, else those of all.

    Raises:
        FormatError: Neither says one; lists every such group.
    """
    kinds = [
        tuple(group.get(name, spec.get(name)) for name in ("schema", "variant")) for group in spec["groups"]
    ]
    faults = Faults(
        (f"says neither schema nor variant: {', '.join(group['params'])}", f"groups/{i}")
        for i, (group, kind) in enumerate(zip(spec["groups"], kinds, strict=True))
        if None in kind
    )
    faults.check(FormatError, "A recording doesn't say which optimizer moves which parameters")
    return [(str(schema), str(variant)) for schema, variant in kinds]


def _parts(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what a description says of each optimizer, one after the other."""
    kinds, groups = kinds_of(spec), spec["groups"]
    kinds_in_order = dict.fromkeys(kinds) or {(spec["schema"], spec["variant"]): None}
    return [
        {
            **spec,
            "schema": schema,
            "variant": variant,
            "groups": [g for g, kind in zip(groups, kinds, strict=True) if kind == (schema, variant)],
        }
        for schema, variant in kinds_in_order
    ]


def _by_optimizer(
    tensors: Mapping[str, Tensor], specs: Sequence[Mapping[str, Any]]
) -> list[dict[str, Tensor]]:
    """Returns the tensors of each optimizer's parameters; what is of none goes with the first."""
    owners = {path: i for i, spec in enumerate(specs) for group in spec["groups"] for path in group["params"]}
    shares: list[dict[str, Tensor]] = [{} for _ in specs]
    for name, tensor in tensors.items():
        kind, _, path = name.partition("/")
        path = path.rpartition("/")[0] if kind == "slot" else path
        shares[owners.get(path, 0)][name] = tensor
    return shares


def decode(tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
    """Returns the canonical state of one step, of several optimizers those of all.

    Raises:
        FormatError: A tensor has no place in it, or a parameter is missing.
        StateError: Parameters don't all count the same updates.
    """
    spec = phase.hyperparameters
    specs = _parts(spec)
    named = _by_optimizer(tensors, specs)
    parts = [_decode(share, step, part) for share, part in zip(named, specs, strict=True)]
    if len(parts) == 1:
        return parts[0]
    carried = [part.extra[other_tensors.CARRIED] for part in parts if other_tensors.CARRIED in part.extra]
    leftovers = {name: tensor for record in carried for name, tensor in record["tensors"].items()}
    return TrainState(
        {path: param for part in parts for path, param in part.params.items()},
        {path: slots for part in parts for path, slots in part.slots.items()},
        _optimizer(spec),
        Counts(step, step),
        {path: rule for part in parts for path, rule in part.rules.items()},
        {other_tensors.CARRIED: {"updates": step, "tensors": leftovers}} if leftovers else {},
    )


def _decode(tensors: Mapping[str, Tensor], step: int, spec: Mapping[str, Any]) -> TrainState:
    """Returns the state of one optimizer."""
    schema, variant = load_schema(spec["schema"]), spec["variant"]
    groups = _groups(spec)
    params = {name[len("param/") :]: t for name, t in tensors.items() if name.startswith("param/")}
    native = schema.slot_names(variant)
    recorded = _slots(tensors, params, native)
    rest = _others(tensors, params, recorded, native)
    faults = Faults(
        [
            *_missing(groups, params),
            *(
                ("has no place in a canonical state", name)
                for name in rest
                if not other_tensors.has_meaning(name, spec)
            ),
        ]
    )
    faults.check(FormatError, f"A recording doesn't hold a state of {schema.name}")
    other_tensors.check(rest, spec, step + _base(groups))
    ordered = {path: params[path] for group in groups for path in group.paths}
    rules = dict(_rules(ordered, groups, spec))
    slots = {
        path: canonical_slots(variant, rules[path], params[path], arrays) if path in rules else arrays
        for path, arrays in recorded.items()
    }
    unused = _others(tensors, params, slots, native)
    state = TrainState(
        {**ordered, **params},
        slots,
        Optimizer(schema.name, variant, groups),
        Counts(step, step),
        rules,
        extra=other_tensors.carried(unused, spec, step),
    )
    # Where slots are born in the first update, state 0 has none: they begin as they would.
    return initial(state) if _unborn(state) else state


def _slots(
    tensors: Mapping[str, Tensor], params: Mapping[str, Tensor], native: Mapping[str, str]
) -> dict[str, dict[str, Tensor]]:
    """Returns what stands under the names of slots, by path and canonical name."""
    return {
        path: {
            name: tensors[full_name]
            for name in native
            if (full_name := f"slot/{path}/{native[name]}") in tensors
        }
        for path in params
    }


def _others(
    tensors: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    slots: Mapping[str, Mapping[str, Tensor]],
    native: Mapping[str, str],
) -> dict[str, Tensor]:
    """Returns what is neither a parameter nor a slot."""
    taken = {f"slot/{path}/{native[name]}" for path, arrays in slots.items() for name in arrays}
    taken |= {f"param/{path}" for path in params}
    return {name: tensor for name, tensor in tensors.items() if name not in taken}


def as_described(state: TrainState, spec: Mapping[str, Any]) -> TrainState:
    """Returns a state that moves as a description says, whatever its tensors alone could say.

    Raises:
        FormatError: A parameter of a group is missing.
        StateError: The tensors say another hyperparameter; lists every one.
    """
    groups = _groups(spec)
    faults = Faults(_missing(groups, state.params))
    schemas = " and ".join(dict.fromkeys(schema for schema, _ in kinds_of(spec)))
    faults.check(FormatError, f"A recording doesn't hold a state of {schemas}")
    Faults(_contradicted(state, groups)).check(
        StateError, "The tensors of a recording contradict its description"
    )
    params = {path: state.params[path] for group in groups for path in group.paths}
    return replace(
        state,
        params={**params, **state.params},
        optimizer=_optimizer(spec),
        rules={path: rule for part in _parts(spec) for path, rule in _rules(params, _groups(part), part)},
        assumptions=(),
    )


def _contradicted(state: TrainState, groups: Sequence[Group]) -> Iterator[tuple[str, str]]:
    """Yields the hyperparameters that tensors say otherwise than a description; it has the learning rates apart."""
    described = {path: group.hyperparameters for group in groups for path in group.paths}
    for group in state.optimizer.groups:
        read = [
            name for name, source in group.known_from.items() if source == "file" and name not in RATE_NAMES
        ]
        for path in (path for path in group.paths if path in described):
            specs = load_schema(state.optimizer.kind(group)[0]).hyperparameters
            for name in (name for name in read if name in described[path]):
                stored, described_value = group.hyperparameters[name], described[path][name]
                if alike(specs.get(name, {}), stored, described_value) is None:
                    yield f"{name} is {stored!r}, described as {described_value!r}", path


def _missing(groups: Sequence[Group], params: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    moved = [path for group in groups for path in group.paths]
    return [("is in a group and not recorded", path) for path in moved if path not in params]


def _groups(spec: Mapping[str, Any]) -> tuple[Group, ...]:
    pairs = zip(spec["groups"], kinds_of(spec), strict=True)
    return tuple(_group(load_schema(schema), variant, group) for group, (schema, variant) in pairs)


def _optimizer(spec: Mapping[str, Any]) -> Optimizer:
    return Optimizer.of(_groups(spec), kinds_of(spec))


BESIDE: Mapping[str, str] = {
    "params": "the group's paths",
    "schema": "whose rule moves the group",
    "variant": "whose rule moves the group",
    "param_names": "their names",
    "param_idx2name": "their names",
    "parameters_names": "their names",
    "name": "the optimizer's own",
    "foreach": "how PyTorch runs",
    "fused": "how PyTorch runs",
    "capturable": "how PyTorch runs",
    "differentiable": "how PyTorch runs",
    "use_locking": "how TensorFlow 1 runs",
    "use_fused_step": "of MXNet: it is the variant",
    "base_lr": "of a schedule; the rate of every update is recorded",
    "show_dominant_parameters": "what ScaledAdam prints",
    "sym": "whence MXNet takes multipliers, which are recorded",
    "initial_lr": "of a schedule; the rate of every update is recorded",
    "lr_scheduler": "the rate of every update is recorded",
    "lr_decay": "the rate of every update is recorded",
    "warmup_steps": "the rate of every update is recorded",
    "train_steps": "the rate of every update is recorded",
    "opt_name": "GPT-Neo's name of the optimizer",
    "lr_mult": "of Megatron-Core: it is in the group's rate",
    "wd_mult": "of Megatron-Core: it is in the group's weight decay",
    "is_expert_parallel": "where Megatron-Core keeps the parameters",
    "is_decoupled_lr": "of Megatron-Core: it is in the group's rate",
}
"""Arguments that the rule of no variant depends on, with what they are."""


def require_known(schema: OptimizerSchema, variant: str, arguments: Mapping[str, Any]) -> None:
    """Raises UnknownRuleError for what a description says of the optimizer and nobody here knows."""
    unknown = [
        ("isn't known", f"{name}={value!r:.60}")
        for name, value in arguments.items()
        if name not in BESIDE and not schema.canonical(variant, {name: value})
    ]
    Faults(unknown).check(
        UnknownRuleError,
        "A recording says something of its optimizer that statekit doesn't know, so that no step can follow it",
        remedy=f"statekit schemas {schema.name} lists what variant {variant} takes",
    )


def _group(schema: OptimizerSchema, variant: str, arguments: Mapping[str, Any]) -> Group:
    require_known(schema, variant, arguments)
    values = schema.canonical(variant, arguments)
    for name in RATE_NAMES:
        if name in values and schema.fault(name, values[name]):
            del values[name]  # a schedule in words: the recording has the learning rate of every update
    if ENCODING in values and values[ENCODING] is not None:
        values[ENCODING] = EIGHTH_POWER  # the object was recorded by what it prints
    return Group(tuple(arguments["params"]), values, dict.fromkeys(values, "file"))


def _rules(
    params: Mapping[str, Tensor], groups: Sequence[Group], spec: Mapping[str, Any]
) -> Iterator[tuple[str, Rule]]:
    """Yields how the variant factors each parameter, if its optimizer factors at all."""
    schema, variant = load_schema(spec["schema"]), spec["variant"]
    constants, settings = variant_constants(schema.name, variant), schema.settings(variant)
    names, given = spec.get("dimension_names", {}), spec.get("rules", {})
    if "v_row" not in schema.slots:
        moved = (path for group in groups for path in group.paths)
        yield from ((path, Rule(tuple(map(Axis, given[path])), "file")) for path in moved if path in given)
        return
    for group in groups:
        settings_of_group = {**settings, **group.hyperparameters}
        apart = settings_of_group["stacked_dim_names"] or ()
        for path in group.paths:
            stacked = [i for i, name in enumerate(names.get(path, ())) if name in apart]
            minimum = settings_of_group["min_dim_size_to_factor"]
            axes = by_shape(constants, params[path].shape, settings_of_group["factored"], minimum, stacked)
            yield path, Rule(tuple(map(Axis, given[path])) if path in given else axes, "file")


def _unborn(state: TrainState) -> bool:
    constants = variant_constants(state.optimizer.schema, str(state.optimizer.variant))
    return state.counts.updates == 0 and constants.get("slots_created") == "first_gradient"


def _base(groups: Sequence[Group]) -> int:
    return int(groups[0].hyperparameters.get("begin_num_update", 0)) if groups else 0


def encode(state: TrainState, phase: Phase) -> dict[str, Tensor]:
    """Returns the tensors of a state under the trajectory's names, without the step."""
    specs, named = _parts(phase.hyperparameters), {f"param/{path}": t for path, t in state.params.items()}
    for part, spec in zip(state.parts(), specs, strict=True):
        named |= _encode(part, spec)
    return named


def _encode(state: TrainState, spec: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of the state of one optimizer."""
    variant = str(state.optimizer.variant)
    named = {f"param/{path}": tensor for path, tensor in state.params.items()}
    if _unborn(state):
        return named
    native = load_schema(state.optimizer.schema).slot_names(variant)
    slots: dict[str, Tensor] = {}
    for path, arrays in state.slots.items():
        rule = state.rules.get(path)
        native_arrays = (
            arrays.items() if rule is None else native_slots(variant, rule, state.params[path], arrays)
        )
        slots |= {f"slot/{path}/{native[name]}": tensor for name, tensor in native_arrays}
    updates = state.counts.updates + _base(state.optimizer.groups)
    return named | slots | other_tensors.tensors(state, spec, updates)


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
