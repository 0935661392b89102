"""Layout `t5x`: the train state of T5X's Adafactor.

    target/<path>  state/step  state/param_states/<path>/{v_row,v_col,v,m}  flax_mutables/...

Source: T5X t5x/adafactor.py, t5x/train_state.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.dropped import dropped_from
from statekit.converters.layouts.hyperparameters import Hyperparameters, OptimizerSpec, manifest_state
from statekit.converters.layouts.t5x.inferred_hyperparameters import (
    RULES,
    inferred,
    logical_rules,
    members,
    scale_by_path,
)
from statekit.converters.layouts.t5x.lines import gin_lines
from statekit.converters.layouts.t5x.tree import (
    SLOTS,
    Native,
    NativeSlots,
    looks_native,
    read_native,
)
from statekit.errors import Faults, InexactError, StateError, some
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.factoring import GivenRules, by_size, effective, fits, from_slots, given_rules
from statekit.state.schedules.called import KEY as CALLED
from statekit.state.stored_slots import with_placeholders
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import DTYPES, Shape, Tensor, in_memory
from statekit.tensors.tree import nested

_EXTRA = ("flax_mutables", "t5x")
_PLACE = "checkpoint_{step}/state"


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

        Raises:
            StateError: Names or shapes break the layout, or contradict what was told; lists every fault.
            UsageError: A hint has a name or value that T5X's Adafactor doesn't take.
        """
        native = read_native(checkpoint)
        known = manifest_state(checkpoint, "adafactor")
        sorted_members, notes = members(checkpoint, hints, known, native.slots)
        faults = Faults()
        groups, rules = [], {}
        stated = {} if known is None or hints.hyperparameters.keys() & set(RULES) else known.rules
        for member in sorted_members:
            slots_by_path = {
                path: native_slots
                for path in member.paths
                if (native_slots := native.slots[path]) is not None
            }
            group, own_rules = _group(member, slots_by_path, stated, faults, notes)
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
        momentum = _with_momentum(native, groups)
        slots = {
            path: _canonical(param_slots, path in momentum)
            for path, param_slots in native.slots.items()
            if param_slots
        }
        variant = hints.variant or (known.variant if known else "t5x")
        counts = Counts(native.step, known.schedule if known else native.step)
        said = (*notes, *_rule_notes(rules)) if known is None or hints.hyperparameters else known.assumptions
        optimizer = Optimizer("adafactor", variant, tuple(groups))
        called = (checkpoint.meta.get("gin") or {}).get(CALLED)
        extra = {**native.extra, **({CALLED: called} if called else {})}
        return TrainState(native.params, slots, optimizer, counts, rules, extra, said)

    def encode(self, state: TrainState) -> Encoded:
        """Returns T5X's tree.

        Raises:
            InexactError: T5X has no place for the optimizer, or for a slot; lists every one.
        """
        if state.optimizer.schema != "adafactor":
            raise InexactError(
                "The layout t5x holds Adafactor's state only.",
                expected="adafactor",
                found=state.optimizer.schema,
            )
        faults = Faults()
        moved = {path for group in state.optimizer.groups for path in group.paths}
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

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        """Returns the lines that go on in T5X, as gin."""
        return gin_lines(state, saved)


def _group(
    member: OptimizerSpec,
    slots_by_path: Mapping[str, NativeSlots],
    stated: Mapping[str, Any],
    faults: Faults,
    notes: list[str],
) -> tuple[Group, dict[str, Rule]]:
    """Settles hyperparameters and rules of the parameters that one optimizer moves.

    Args:
        member: The parameters, and what was told about their optimizer.
        slots_by_path: Their slots.
        stated: Rules that a manifest states.
        faults: Where what was told and what the slots show contradict each other; added to.
        notes: What is open or assumed; added to.
    """
    specified = member.hyperparameters
    rules = _specified_rules(specified)
    by_shape = [
        slots
        for path, slots in slots_by_path.items()
        if len(slots.shape) == 2 and not _has_batch(rules.find(path)[1])
    ]
    if member.settled:
        hyperparameters, open_points = Hyperparameters(), list[str]()
    else:
        hyperparameters, open_points = inferred(list(slots_by_path.values()), by_shape, specified)
    settled = hyperparameters.under(specified)
    faults += _contradictions(slots_by_path, specified)
    own_rules = {}
    for path, slots in slots_by_path.items():
        known = _as_t5x(Rule.from_json(stated[path]), slots.shape) if path in stated else None
        rule = known or _rule(path, slots, rules, settled)
        if (fault := _rule_fault(rule, slots)) is not None:
            faults.add(fault, path)
        elif rule is not None:
            own_rules[path] = rule
    kept = {name: value for name, value in settled.values.items() if name not in RULES}
    if kept.get("learning_rate") is None:
        kept.pop("learning_rate", None)
    if (scale := kept.get("multiply_by_parameter_scale")) is not None:
        kept["multiply_by_parameter_scale"] = scale_by_path(scale, member.paths, faults)
    if "beta1" not in kept and any(slots.momentum for slots in slots_by_path.values()):
        notes.append("beta1 isn't stored: m is in use, so momentum was on; a step needs its value.")
    notes += [*_default_notes(kept, settled), *open_points]
    return Group(member.paths, kept, {name: settled.known_from[name] for name in kept}), own_rules


def _specified_rules(specified: Hyperparameters) -> GivenRules:
    factor_map, by_axis, axes = (specified.values.get(name) for name in RULES)
    return given_rules(factor_map, logical_rules(by_axis), axes)


def _as_t5x(rule: Rule, shape: Shape) -> Rule:
    """Returns a rule with T5X's labels: it reads a matrix by its size, whatever another system called row."""
    other_way = rule.factored and len(rule.axes) == 2 and rule.axes == by_size(shape)[::-1]
    return Rule(by_size(shape), rule.known_from) if other_way else rule


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
    by_map = (
        settled.is_known("factor_map") and not logical
    )  # then every path has an entry; None is the heuristic
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
    if rule.factored != slots.factored or (slots.factored and not fits(rule.axes, slots.shape, row, column)):
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


def _placed(
    path: str, param: Tensor, slots: Mapping[str, Tensor], rule: Rule | None, faults: Faults
) -> dict[str, Tensor]:
    """Returns the four slots of a parameter; placeholders where one isn't in use."""
    if not ({"v"} <= slots.keys() or {"v_row", "v_col"} <= slots.keys()):
        faults.add("has no second moment", path)
    faults += [(f"has slot {name}, for which T5X has no place", path) for name in slots if name not in SLOTS]
    if rule is not None and rule.factored and len(rule.axes) == 2 and Axis.BATCH not in rule.axes:
        if _as_t5x(rule, param.shape) != rule:
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
