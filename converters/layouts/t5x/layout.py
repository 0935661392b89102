"""Layout `t5x`: the train state of T5X's Adafactor.

    target/<path>  state/step  state/param_states/<path>/{v_row,v_col,v,m}  flax_mutables/...

Every moved parameter has all four slots; one that isn't in use is a placeholder of shape (1,). A parameter that no
optimizer of a MultiOptimizer moves has None instead. T5X stores no hyperparameters: they are given, found in a gin file
or manifest, inferred from the slots, or assumed.
Source: T5X t5x/adafactor.py, `init_param_state`; t5x/train_state.py; t5x/optimizers.py, `MultiOptimizer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence, dropped_from
from statekit.converters.layouts.hyperparameters import (
    Hyperparameters,
    ManifestRecord,
    OptimizerSpec,
    manifest_state,
    with_minimum,
)
from statekit.converters.layouts.t5x.lines import gin_lines
from statekit.converters.layouts.t5x.traversals import TRAVERSALS, traversed
from statekit.errors import Faults, InexactError, StateError, some
from statekit.files.checkpoint import FILES_BESIDE, Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.factoring import (
    PLACEHOLDER,
    GivenRules,
    by_size,
    effective,
    first_entry,
    from_slots,
    given_rules,
    map_entries,
    with_placeholders,
)
from statekit.state.factoring import fits as fits_slots
from statekit.state.options import checked_hparams, read_hparams
from statekit.state.schedules.called import KEY as CALLED
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import DTYPES, DType, Shape, Tensor, in_memory
from statekit.tensors.tree import Tree, nested, walk
from statekit.tensors.typed import Natural, fits, shown

SLOTS = ("v_row", "v_col", "v", "m")
_EXTRA = ("flax_mutables", "t5x")
_PLACE = "checkpoint_{step}/state"


@dataclass(frozen=True)
class NativeSlots:
    """What the slots of one parameter prove.

    Attributes:
        shape: The parameter's.
        slots: The four native slots.
        factored: Whether `v_row` and `v_col` are in use, and not `v`.
        momentum: Whether `m` is in use; None where the parameter's own shape is (1,) and `m` is zero.
    """

    shape: Shape
    slots: Mapping[str, Tensor]
    factored: bool
    momentum: bool | None

    @property
    def momentum_dtype(self) -> DType:
        """The dtype of `m`."""
        return self.slots["m"].dtype


@dataclass(frozen=True)
class Native:
    """A T5X train state, sorted.

    Attributes:
        params: Parameter by path.
        slots: Slots by path; None where no optimizer moves the parameter. Empty if the file has no optimizer state.
        step: `state/step`.
        extra: Everything else.
    """

    params: Mapping[str, Tensor]
    slots: Mapping[str, NativeSlots | None]
    step: int
    extra: Mapping[str, Tree]


def looks_native(checkpoint: Checkpoint) -> str | None:
    """Returns why a checkpoint is a T5X train state with Adafactor's slots; None if it isn't."""
    if not _is_train_state(checkpoint.tree):
        return None
    slots = [name for name in checkpoint.tensors if name.startswith("state/param_states/")]
    if not slots:
        return "it has target and state/step, and no slots"
    if all(name.rpartition("/")[2] in SLOTS for name in slots) and any(
        name.endswith("/v_row") for name in slots
    ):
        return f"it has target, state/step and {slots[0]}"
    return None


def _is_train_state(tree: Tree) -> bool:
    if not isinstance(tree, Mapping) or not isinstance(tree.get("target"), Mapping):
        return False
    state = tree.get("state")
    return isinstance(state, Mapping) and "step" in state


def read_native(checkpoint: Checkpoint) -> Native:
    """Sorts a tree into parameters, slots, step and the rest.

    Raises:
        StateError: Names or shapes aren't those of T5X's Adafactor; lists every fault.
    """
    tree = checkpoint.tree
    if not _is_train_state(tree):
        raise StateError(
            "The checkpoint isn't a train state of T5X.",
            place=checkpoint.path,
            expected="target and state/step",
        )
    state: Mapping[str, Any] = tree["state"]
    faults = Faults()
    params = {}
    for path, leaf in walk(tree["target"]):
        if isinstance(leaf, Tensor):
            params["/".join(map(str, path))] = leaf
        elif leaf not in (None, {}):
            faults.add(f"is no tensor but {type(leaf).__name__}", "/".join(map(str, ("target", *path))))
    slots = dict(_stored_slots(state.get("param_states"), faults))
    slots_by_path: dict[str, NativeSlots | None] = {}
    for name, param_slots in slots.items():
        if name not in params:
            faults.add("has slots but no parameter", name)
        elif param_slots is None:
            slots_by_path[name] = None
        elif (described := _described(name, params[name].shape, param_slots, faults)) is not None:
            slots_by_path[name] = described
    if slots:
        faults += [("has no slots, and no None in their place", name) for name in params if name not in slots]
    step = _step(state["step"], faults, "iuf" if checkpoint.container == "orbax" else "iu")
    faults.check(
        StateError,
        "The checkpoint isn't a state of T5X's Adafactor",
        place=checkpoint.path,
        remedy="a checkpoint of another optimizer needs that optimizer's layout",
    )
    return Native(params, slots_by_path, step, _rest(tree, checkpoint.meta))


def _stored_slots(states: Any, faults: Faults) -> Iterator[tuple[str, dict[str, Tensor] | None]]:
    by_param: dict[str, dict[str, Tensor]] = {}
    if states and not isinstance(states, Mapping):
        faults.add(f"is {shown(states)}, expected slots by parameter", "state/param_states")
        return
    for path, leaf in walk(states) if states else ():
        parent = "/".join(map(str, path[:-1]))
        if isinstance(leaf, Tensor):
            by_param.setdefault(parent, {})[str(path[-1])] = leaf
        elif leaf is None and parent not in by_param:
            yield "/".join(map(str, path)), None
        elif leaf != {}:
            faults.add(f"is no slot but {type(leaf).__name__}", "/".join(map(str, path)))
    yield from by_param.items()


def _described(path: str, shape: Shape, slots: Mapping[str, Tensor], faults: Faults) -> NativeSlots | None:
    """Sorts four slots by the parameter's shape, not by theirs: one of shape (1,) has real slots of that shape."""
    wrong = [f"has no slot {name}" for name in SLOTS if name not in slots]
    wrong += [f"has an unknown slot {name}" for name in slots if name not in SLOTS]
    if not wrong:
        v, m = slots["v"].shape, slots["m"].shape
        wrong += [
            f"slot {name} has shape {stored}, expected {shape}, or {PLACEHOLDER} if not in use"
            for name, stored in (("v", v), ("m", m))
            if stored not in (shape, PLACEHOLDER)
        ]
        if v == shape and (slots["v_row"].shape, slots["v_col"].shape) != (PLACEHOLDER, PLACEHOLDER):
            wrong.append(f"has a full v beside v_row {slots['v_row'].shape} and v_col {slots['v_col'].shape}")
    faults += [(fault, path) for fault in wrong]
    if wrong:
        return None
    momentum = m == shape
    if shape == PLACEHOLDER and not np.any(slots["m"].read()):
        return NativeSlots(shape, slots, v != shape, None)
    return NativeSlots(shape, slots, v != shape, momentum)


def _step(leaf: Any, faults: Faults, kinds: str) -> int:
    """Returns the step. It may be a float in Orbax, as T5X casts all leaves that it restores with a dtype."""
    is_count = isinstance(leaf, Tensor) and leaf.shape == () and leaf.dtype.kind in kinds
    scalar = leaf.read().item() if is_count else leaf
    scalar = int(scalar) if isinstance(scalar, float) and is_count and scalar.is_integer() else scalar
    if not fits(scalar, Natural):
        leaf_type = f"{leaf.dtype} {leaf.shape}" if isinstance(leaf, Tensor) else type(leaf).__name__
        faults.add(f"is no integer scalar but {leaf_type}", "state/step")
        return 0
    return int(scalar)


def _rest(tree: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Tree]:
    """Returns what is neither parameter nor slot nor step."""
    state = {key: value for key, value in tree["state"].items() if key not in ("step", "param_states")}
    other = {key: value for key, value in tree.items() if key not in ("target", "state", "flax_mutables")}
    rest = {**other, **({"state": state} if state else {})}
    parts = {
        "flax_mutables": tree.get("flax_mutables"),
        "t5x": rest,
        FILES_BESIDE: list(meta.get(FILES_BESIDE, ())),
    }
    return {key: value for key, value in parts.items() if value}


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


def defaults() -> dict[str, Any]:
    """Returns T5X's defaults. Source: T5X t5x/adafactor.py, `Adafactor.__init__`."""
    return dict(load_schema("adafactor").variants["t5x"]["defaults"])


def members(
    checkpoint: Checkpoint,
    hints: CheckpointRef,
    manifest: ManifestRecord | None,
    slots_by_path: Mapping[str, NativeSlots | None],
) -> tuple[list[OptimizerSpec], list[str]]:
    """Sorts the moved parameters by optimizer: as traversals or the manifest say, else by whether they have momentum.

    Returns:
        The members, each with what is told about it: by the user, by the manifest, by a gin file. What is open.

    Raises:
        UsageError: The user's hyperparameters can't be, or the traversals don't select exactly the parameters that
            have slots; lists every one.
    """
    given = checked_hparams(*_T5X, hints.hyperparameters, only=defaults(), unchecked=(*RULES, TRAVERSALS))
    gin, notes = _from_gin(checkpoint)
    if TRAVERSALS in given:
        traversals = given.pop(TRAVERSALS)
        read = partial(checked_hparams, *_T5X, only=defaults(), unchecked=RULES)
        return traversed(traversals, gin.over(given, "given"), slots_by_path, read), notes
    if manifest is not None:
        return [
            replace(
                group,
                paths=tuple(path for path in group.paths if slots_by_path.get(path) is not None),
                hyperparameters=gin.under(group.hyperparameters).over(given, "given"),
            )
            for group in manifest.groups
        ], notes
    specified = gin.over(given, "given")
    parts, note = _by_momentum(slots_by_path)
    return [OptimizerSpec(paths, specified) for paths in parts if paths], [*notes, *note]


def _by_momentum(
    slots_by_path: Mapping[str, NativeSlots | None],
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Returns the moved parameters of each optimizer, which momentum distinguishes, and the assumptions."""
    momentum = {path: slots.momentum for path, slots in slots_by_path.items() if slots is not None}
    if {True, False} <= set(momentum.values()):
        parts = [tuple(p for p in momentum if momentum[p]), tuple(p for p in momentum if not momentum[p])]
        return parts, (
            "Some parameters have momentum and others don't: they are taken for two optimizers' parameters.",
        )
    if None in slots_by_path.values():
        note = "Which optimizer moved a parameter isn't stored; all that have slots are taken to share one."
        return [tuple(momentum)], (note,)
    return [tuple(momentum)], ()


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


def inferred(
    all_slots: Sequence[NativeSlots], by_size: Sequence[NativeSlots], specified: Hyperparameters
) -> tuple[Hyperparameters, list[str]]:
    """Returns T5X's defaults, corrected by one optimizer's slots, and the names that stay open.

    Args:
        all_slots: Slots of all its parameters.
        by_size: Of them the matrices that have no rule of their own.
        specified: What is known already.
    """
    notes = []
    proven = _proven(all_slots)
    hyperparameters = Hyperparameters().over(defaults(), "assumed").over(proven, "file")
    by_rules = any(map(specified.is_known, RULES))
    # T5X's defaults would have factored one of these, had they been the run's.
    if (
        "factored" not in proven
        and not by_rules
        and any(_factors(slots.shape, hyperparameters.values) for slots in all_slots)
    ):
        hyperparameters = hyperparameters.over({"factored": False}, "assumed")
    if hyperparameters.values["factored"] and not specified.is_known("min_dim_size_to_factor"):
        yes = [min(slots.shape) for slots in by_size if slots.factored]
        hyperparameters, note = with_minimum(
            hyperparameters, yes, [min(slots.shape) for slots in by_size if not slots.factored]
        )
        notes += note
    values = dict(hyperparameters.values)
    if "dtype_momentum" in proven:  # there was momentum, with a beta1 that no slot shows
        del values["beta1"]
    return Hyperparameters(values, {name: hyperparameters.known_from[name] for name in values}), notes


def _proven(all_slots: Sequence[NativeSlots]) -> dict[str, Any]:
    """Returns the hyperparameters that the slots of an optimizer's parameters prove."""
    proven: dict[str, Any] = {}
    momenta = [slots.momentum_dtype.name for slots in all_slots if slots.momentum]
    if momenta:
        proven["dtype_momentum"] = momenta[0]
    elif any(slots.momentum is False for slots in all_slots):
        proven["beta1"] = None
    if any(slots.factored for slots in all_slots):
        proven["factored"] = True
    return proven


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


@dataclass(frozen=True)
class T5XAdafactor:
    """T5X's Adafactor."""

    name: str = "t5x"
    title: str = "T5X's Adafactor: target and state/param_states, unused slots as zeros of shape (1,)"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"adafactor": ("t5x",)})
    containers: tuple[str, ...] = ("t5x", "orbax")
    schedule_in: str = "state/step"

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks at names and shapes only."""
        because = looks_native(checkpoint)
        return None if because is None else Evidence(20, because)

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state.

        Hyperparameters come, the stronger first, from the hints, from the manifest of a conversion, from the run's gin
        file, from what the slots prove, and from T5X's defaults.
        """
        native = read_native(checkpoint)
        manifest = manifest_state(checkpoint, "adafactor")
        groups, rules, notes = _groups_and_rules(checkpoint, hints, manifest, native)
        if manifest is not None and not hints.hyperparameters:
            notes = manifest.assumptions
        variant = hints.variant or (manifest.variant if manifest else "t5x")
        return TrainState(
            native.params,
            _slots(native, groups),
            Optimizer("adafactor", variant, groups),
            Counts(native.step, manifest.schedule if manifest else native.step),
            rules,
            _extra(native, checkpoint),
            notes,
        )

    def encode(self, state: TrainState) -> Encoded:
        return encoded(state)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return gin_lines(state, saved)


def _groups_and_rules(
    checkpoint: Checkpoint, hints: CheckpointRef, manifest: ManifestRecord | None, native: Native
) -> tuple[tuple[Group, ...], dict[str, Rule], tuple[str, ...]]:
    """Returns a group for each optimizer, the rule of each parameter, and what is open or assumed."""
    specs, notes = members(checkpoint, hints, manifest, native.slots)
    stated = {} if manifest is None or hints.hyperparameters.keys() & set(RULES) else manifest.rules
    faults, groups, rules = Faults(), list[Group](), dict[str, Rule]()
    for spec in specs:
        slots_by_path = {path: slots for path in spec.paths if (slots := native.slots[path]) is not None}
        group, own_rules = _group(spec, slots_by_path, stated, faults, notes)
        groups.append(group)
        rules.update(own_rules)
    faults.check(
        StateError,
        "What is told about the run contradicts its checkpoint",
        place=checkpoint.path,
        remedy="check the hyperparameters against the run's gin file",
    )
    if not native.slots:
        notes.append("The checkpoint holds no optimizer state, only parameters.")
        groups = [Group(tuple(native.params))]
    return tuple(groups), rules, (*notes, *_rule_notes(rules))


def _group(
    spec: OptimizerSpec,
    slots_by_path: Mapping[str, NativeSlots],
    stated: Mapping[str, Any],
    faults: Faults,
    notes: list[str],
) -> tuple[Group, dict[str, Rule]]:
    """Settles hyperparameters and rules of the parameters that one optimizer moves."""
    given = _specified_rules(spec.hyperparameters)
    settled, open_points = _hyperparameters(spec, slots_by_path, given)
    faults += _contradictions(slots_by_path, spec.hyperparameters)
    rules = _rules(slots_by_path, stated, given, settled, faults)
    values = {name: value for name, value in settled.values.items() if name not in RULES}
    if values.get("learning_rate") is None:
        values.pop("learning_rate", None)
    if (scale := values.get("multiply_by_parameter_scale")) is not None:
        values["multiply_by_parameter_scale"] = scale_by_path(scale, spec.paths, faults)
    if "beta1" not in values and any(slots.momentum for slots in slots_by_path.values()):
        notes.append("beta1 isn't stored: m is in use, so momentum was on; a step needs its value.")
    notes += [*_default_notes(values, settled), *open_points]
    return Group(spec.paths, values, {name: settled.known_from[name] for name in values}), rules


def _hyperparameters(
    spec: OptimizerSpec, slots_by_path: Mapping[str, NativeSlots], given: GivenRules
) -> tuple[Hyperparameters, list[str]]:
    """Returns what is told, over what the slots prove and T5X's defaults; and what is open."""
    if spec.settled:
        return Hyperparameters().under(spec.hyperparameters), []
    by_shape = [
        slots
        for path, slots in slots_by_path.items()
        if len(slots.shape) == 2 and not _has_batch(given.find(path)[1])
    ]
    hyperparameters, open_points = inferred(list(slots_by_path.values()), by_shape, spec.hyperparameters)
    return hyperparameters.under(spec.hyperparameters), open_points


def _rules(
    slots_by_path: Mapping[str, NativeSlots],
    stated: Mapping[str, Any],
    given: GivenRules,
    settled: Hyperparameters,
    faults: Faults,
) -> dict[str, Rule]:
    """Returns the rule of each parameter: by the manifest, else by the user, else by its slots."""
    rules = {}
    for path, slots in slots_by_path.items():
        by_manifest = as_t5x(Rule.from_json(stated[path]), slots.shape) if path in stated else None
        rule = by_manifest or _rule(path, slots, given, settled)
        if (fault := _rule_fault(rule, slots)) is not None:
            faults.add(fault, path)
        elif rule is not None:
            rules[path] = rule
    return rules


def _slots(native: Native, groups: Sequence[Group]) -> dict[str, dict[str, Tensor]]:
    """Returns the slots that are in use."""
    momentum = _with_momentum(native, groups)
    return {
        path: _canonical(slots, path in momentum) for path, slots in native.slots.items() if slots is not None
    }


def _extra(native: Native, checkpoint: Checkpoint) -> dict[str, Tree]:
    """Returns what the file holds besides, and the schedule that the run's gin file calls."""
    schedule = (checkpoint.meta.get("gin") or {}).get(CALLED)
    return {**native.extra, **({CALLED: schedule} if schedule else {})}


def _specified_rules(specified: Hyperparameters) -> GivenRules:
    factor_map, by_axis, axes = (specified.values.get(name) for name in RULES)
    return given_rules(factor_map, logical_rules(by_axis), axes)


def _has_batch(labels: tuple[Axis, ...] | None) -> bool:
    return labels is not None and Axis.BATCH in labels


def _contradictions(
    slots_by_path: Mapping[str, NativeSlots], specified: Hyperparameters
) -> Iterator[tuple[str, str]]:
    beta1 = specified.values.get("beta1")
    for path, slots in slots_by_path.items():
        if (
            specified.is_known("beta1")
            and slots.momentum is not None
            and slots.momentum != (beta1 is not None)
        ):
            yield f"beta1 is {beta1}, but m is {'in use' if slots.momentum else 'a placeholder'}", path
        stated = specified.values.get("dtype_momentum")
        if slots.momentum and specified.is_known("dtype_momentum") and stated != slots.momentum_dtype.name:
            yield f"dtype_momentum is {stated}, but m is {slots.momentum_dtype}", path


def _rule(path: str, slots: NativeSlots, rules: GivenRules, settled: Hyperparameters) -> Rule | None:
    """Returns how a parameter is factored: as told, else as its slots show. None if T5X would stop there."""
    values = settled.values
    factored, minimum = values.get("factored", True), values.get("min_dim_size_to_factor", 0)
    logical = values.get("logical_factor_rules") is not None
    # Then every path has an entry; None is the heuristic.
    by_map = settled.is_known("factor_map") and not logical
    stated, labels = rules.find(path)
    unfactored = settled.is_known("factored") and not factored
    if stated or unfactored or (by_map and values["factor_map"] is None):
        axes = effective(labels, slots.shape, factored, minimum)
        source = next((name for name in RULES if settled.is_known(name)), "factored")
        return None if axes is None else Rule(axes, settled.known_from[source])
    if by_map:
        return None
    if slots.factored:
        return from_slots(slots.shape, slots.slots["v_row"].shape, slots.slots["v_col"].shape, logical)
    return Rule((Axis.NONE,) * len(slots.shape), "file" if len(slots.shape) < 2 else "assumed")


def _rule_fault(rule: Rule | None, slots: NativeSlots) -> str | None:
    row, column = slots.slots["v_row"].shape, slots.slots["v_col"].shape
    has = f"v_row {row} and v_col {column}" if slots.factored else "a full v"
    if rule is None:
        return f"has {has}, and no factor rule that T5X would take gives that for shape {slots.shape}"
    labels = ", ".join(axis.value for axis in rule.axes)
    if len(rule.axes) != len(slots.shape):
        return f"has shape {slots.shape}, but a factor rule of {labels}"
    if rule.factored != slots.factored or (
        slots.factored and not fits_slots(rule.axes, slots.shape, row, column)
    ):
        gives = (
            [rule.slot_shape(name, slots.shape) for name in ("v_row", "v_col")]
            if rule.factored
            else "a full v"
        )
        return f"has {has}, but the rule ({labels}) gives {gives}"
    return None


def _with_momentum(native: Native, groups: Sequence[Group]) -> set[str]:
    """Returns the parameters whose `m` is in use. Where its shape hides that, others of the same optimizer tell."""
    on: set[str] = set()
    for group in groups:
        momenta = {
            path: slots.momentum for path in group.paths if (slots := native.slots.get(path)) is not None
        }
        hidden = any(momenta.values()) or group.hyperparameters.get("beta1") is not None
        on |= {path for path, momentum in momenta.items() if momentum or (momentum is None and hidden)}
    return on


def _canonical(slots: NativeSlots, momentum: bool) -> dict[str, Tensor]:
    names = [*(("v_row", "v_col") if slots.factored else ("v",)), *(("m",) if momentum else ())]
    return {name: slots.slots[name] for name in names}


def _default_notes(values: Mapping[str, Any], settled: Hyperparameters) -> Iterator[str]:
    assumed = [f"{name}={values[name]}" for name in values if settled.known_from[name] == "assumed"]
    if assumed:
        yield f"T5X stores no hyperparameters; assumed: {', '.join(assumed)}."


def _rule_notes(rules: Mapping[str, Rule]) -> Iterator[str]:
    """Says which rules are assumed, one sentence for each kind of parameter."""
    open_rules = {path: rule for path, rule in rules.items() if rule.known_from == "assumed"}
    high = [path for path, rule in open_rules.items() if len(rule.axes) > 2]
    square = [path for path, rule in open_rules.items() if len(rule.axes) == 2 and rule.factored]
    flat = [path for path, rule in open_rules.items() if len(rule.axes) == 2 and not rule.factored]
    if high:
        yield (
            f"How parameters of rank 3 and more are factored isn't proven by their slots ({some(high)}): a step needs"
            " factor_map, or logical_factor_rules with logical_axes, or factored=false."
        )
    if square:
        yield (
            f"In square matrices v_row is taken to average axis 1, as T5X has it ({some(square)}); a state that T5X's"
            " importer took from Mesh TensorFlow has the two exchanged."
        )
    if flat:
        yield f"Unfactored matrices are taken to have no BATCH axis ({some(flat)})."


def encoded(state: TrainState) -> Encoded:
    """Returns T5X's tree.

    Raises:
        InexactError: T5X has no place for the optimizer, or for a slot; lists every one.
    """
    if state.optimizer.schema != "adafactor":
        raise InexactError(
            "The layout t5x holds Adafactor's state only.", expected="adafactor", found=state.optimizer.schema
        )
    faults = Faults()
    moved = set(state.optimizer.paths)
    states: dict[tuple[str, ...], Any] = {}
    for path, param in state.params.items() if state.slots else ():
        slots = state.slots.get(path, {})
        node = (
            None
            if not slots and path not in moved
            else _placed(path, param, slots, state.rules.get(path), faults)
        )
        states[tuple(path.split("/"))] = node
    if not 0 <= state.counts.updates < 2**31:
        faults.add(f"{state.counts.updates} updates don't fit int32", "state/step")
    faults.check(InexactError, "T5X can't hold the state")
    extra = {name: state.extra[name] for name in _EXTRA if name in state.extra}
    beyond = extra.pop("t5x", {})
    tree = {
        "state": {
            "param_states": nested(states),
            "step": in_memory(np.asarray(state.counts.updates, np.int32), "state/step"),
            **beyond.get("state", {}),
        },
        "target": nested({tuple(path.split("/")): param for path, param in state.params.items()}),
        **extra,
        **{key: value for key, value in beyond.items() if key != "state"},
    }
    return Encoded(tree, state.counts.updates, dropped=_dropped(state), place=_PLACE)


def as_t5x(rule: Rule, shape: Shape) -> Rule:
    """Returns a rule with T5X's labels: it reads a matrix by its size, whatever another system called row."""
    other_way = rule.factored and len(rule.axes) == 2 and rule.axes == by_size(shape)[::-1]
    return Rule(by_size(shape), rule.known_from) if other_way else rule


def _placed(
    path: str, param: Tensor, slots: Mapping[str, Tensor], rule: Rule | None, faults: Faults
) -> dict[str, Tensor]:
    """Returns the four slots of a parameter; placeholders where one isn't in use."""
    if not ({"v"} <= slots.keys() or {"v_row", "v_col"} <= slots.keys()):
        faults.add("has no second moment", path)
    faults += [(f"has slot {name}, for which T5X has no place", path) for name in slots if name not in SLOTS]
    if rule is not None and rule.factored and len(rule.axes) == 2 and Axis.BATCH not in rule.axes:
        if as_t5x(rule, param.shape) != rule:
            slots = {**slots, "v_row": slots["v_col"], "v_col": slots["v_row"]}
        elif rule.axes != by_size(param.shape):
            faults.add("is a matrix that is factored along one axis only", path)
    filled = with_placeholders("t5x", slots, SLOTS, DTYPES["float32"])
    return {name: filled[name] for name in sorted(SLOTS)}


def _dropped(state: TrainState) -> dict[str, str]:
    dropped = dropped_from(state.extra, _EXTRA, "T5X")
    if state.counts.schedule != state.counts.updates:
        dropped["counts/schedule"] = "T5X has one step for both, and the optimizer's is kept"
    return dropped


LAYOUT = T5XAdafactor()
