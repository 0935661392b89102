"""Carries out what a user wants changed of a run, and says of each change in a sentence what it did, by name."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np

from statekit.conversion.changing.changes import AT, COUNT, FLOATS, Change, Changes, Policy, option
from statekit.conversion.contracts import Encoded
from statekit.conversion.resume import needs_weights
from statekit.errors import Faults, UsageError, meant, some
from statekit.state.exactness import Exactness
from statekit.state.run import BESIDE, BUFFERS, GRADIENTS, SIDE_BY_SIDE, RunState, run_of
from statekit.state.schedules.called import KEY as CALLED
from statekit.state.schema import WEIGHTS, OptimizerSchema, load_schema
from statekit.state.stored_params import MASTER, check_known, decoded
from statekit.state.train_state import Counts, Group, Optimizer, StepOffset, TrainState
from statekit.tensors.tensor import DTYPES, Cast, DType, Filled, Tensor, float_info, widens
from statekit.tensors.tree import walk, with_leaves, without
from statekit.tensors.views import Scaled, cast

_OF_RUN = (BESIDE, SIDE_BY_SIDE, "param_groups", CALLED)
"""What `extra` holds of a run that weights alone leave behind."""


def changed(
    state: TrainState, asked: Changes, makers: Iterable[str]
) -> tuple[TrainState, tuple[Change, ...]]:
    """Returns a state with changes made, and what they were.

    Args:
        state: The state.
        asked: What shall be changed.
        makers: The variants that may have made it, where it doesn't say which.

    Raises:
        UsageError: Something that is named isn't there, or can't be changed so; names it.
        InexactError: Nobody said how parameters are stored that shall go on alone.
    """
    if state.optimizer.schema == WEIGHTS and asked.options != ["param_dtype"] and not asked.params_only:
        raise UsageError(
            "The source holds weights alone: it has no slots and no counts to change.",
            place=", ".join(map(option, asked.options)),
            expected=option("param_dtype"),
        )
    done: list[Change] = []
    if asked.params_only:
        check_known(state, makers)
        state = _params_only(state.per_optimizer(decoded), done)
    state = _frozen(state, asked.drop_slots_of, done)
    state, policy = _begun_anew(state, asked.slot_policy, done)
    state = _by_policy(state, policy, done)
    state = _at_schedule(state, asked.schedule_step, done)
    if asked.loss_scale is not None:
        state = _rescaled(state, asked.loss_scale, done)
    if asked.slot_dtype:
        state = _slots_cast(state, asked.slot_dtype, done)
    if asked.param_dtype is not None:
        state = _params_cast(state, DTYPES[asked.param_dtype], done)
    return state, tuple(done)


def without_model(encoded: Encoded, target: tuple[str, str], state: TrainState) -> tuple[Encoded, Change]:
    """Returns a state in native form without its parameters, and what that leaves behind.

    Raises:
        UsageError: The target has no form of an optimizer's state alone; says why.
    """
    why = needs_weights(*target)
    if why is not None:
        raise UsageError(
            "The target has no form of an optimizer's state without its parameters.",
            place=option("state_only"),
            expected="--to torch, and --layout torch-optim or torch-fqn",
            found=f"layout {target[0]}, container {target[1]}: {why}",
            remedy="convert the whole run",
        )

    def alone(form: Encoded) -> Encoded:
        parts = {name: keys for name, keys in form.parts.items() if name != "model"}
        return replace(form, tree=without(form.tree, form.parts["model"]), parts=parts)

    reason = f"{len(state.params)} parameters are left behind: the model has them from elsewhere"
    change = Change(
        option("state_only"), reason, tuple(f"params/{path}" for path in state.params), Exactness.LOSSY
    )
    return alone(encoded), change


def _params_only(state: TrainState, done: list[Change]) -> TrainState:
    slots = [f"{path}/{name}" for path, tensors in state.slots.items() for name in tensors]
    slots += [f"groups/{i}/{n}" for i, group in enumerate(state.optimizer.groups) for n in group.slots]
    kept = {key: part for key, part in state.extra.items() if key not in (*_OF_RUN, "buffers")}
    run_parts = [f"extra/{key}" for key in state.extra if key in _OF_RUN]
    buffers: Mapping[str, Tensor] = state.extra.get("buffers") or {}
    done.append(
        Change(
            option("params_only"),
            f"the optimizer is left behind, {len(slots)} slots and all counts; the next update is a new one's first",
            (*slots, *run_parts),
            Exactness.LOSSY,
        )
    )
    at = state.counts.schedule
    params = {**state.params, **buffers}
    return TrainState(params, {}, Optimizer(WEIGHTS, None, ()), Counts(at, at), {}, kept)


def _frozen(state: TrainState, patterns: Iterable[str], done: list[Change]) -> TrainState:
    moved = list(state.optimizer.paths)
    gone: dict[str, None] = {}
    for pattern in patterns:
        fitting = [path for path in moved if fnmatchcase(path, pattern)]
        if not fitting:
            raise UsageError(
                "No parameter that is moved has such a name.",
                place=option("drop_slots_of"),
                found=pattern,
                expected=some(moved),
                remedy=meant(pattern, moved),
            )
        gone.update(dict.fromkeys(fitting))
    if not gone:
        return state
    if len(gone) == len(moved):
        raise UsageError(
            "No parameter would be left for the optimizer.",
            place=option("drop_slots_of"),
            remedy="to leave the optimizer behind: --params-only",
        )
    slots = [f"{path}/{name}" for path in gone for name in state.slots.get(path, {})]
    done.append(
        Change(
            option("drop_slots_of"),
            f"frozen: {len(gone)} of {len(moved)} parameters keep their values, without their {len(slots)} slots",
            tuple(gone),
            Exactness.LOSSY,
        )
    )
    kinds = [state.optimizer.kind(group) for group in state.optimizer.groups]
    trained = state.only(path for path in state.params if path not in gone)
    return replace(trained, params=state.params, optimizer=Optimizer.of(trained.optimizer.groups, kinds))


def _by_policy(state: TrainState, policy: Mapping[str, Policy], done: list[Change]) -> TrainState:
    names = _slots_of(state)
    ways = _ways(names, policy)
    dropped = [name for name, way in ways.items() if way == "drop"]
    reset = [name for name, way in ways.items() if way == "reset" and name != COUNT]
    if dropped:
        state = state.per_optimizer(
            lambda part: _dropped(part, [n for n in dropped if n in _slots_of(part)], done)
        )
    for name in reset:
        state = state.per_optimizer(partial(_reset, name=name, done=done))
    if ways.get(COUNT) == "reset":
        return _recounted(state, done)
    done += _forms_that_stay(state, [name for name in names if name not in dropped], reset)
    return state


def _forms_that_stay(state: TrainState, slots: Sequence[str], reset: Collection[str]) -> Iterator[Change]:
    """Yields a word on the second moments that stay where other forms of them begin anew."""
    forms = [name for name in slots if _decided(state, name)]
    kept = [name for name in forms if name not in reset]
    if kept and len(kept) < len(forms):
        reason = f"{', '.join(kept)} stay: 'reset:v*' means all second moments"
        yield Change(option("slot_policy"), reason, (), Exactness.BITWISE)


def _ways(slots: Sequence[str], policy: Mapping[str, Policy]) -> dict[str, Policy]:
    """Returns what becomes of each slot that a pattern names, and of the count where `count` itself is named."""
    ways: dict[str, Policy] = {}
    for pattern, way in policy.items():
        fitting = [COUNT] if pattern == COUNT else [name for name in slots if fnmatchcase(name, pattern)]
        if not fitting:
            raise UsageError(
                "The state has no slot of that name.",
                place=option("slot_policy"),
                found=pattern,
                expected=", ".join((*slots, COUNT)),
                remedy=meant(pattern, (*slots, COUNT)),
            )
        ways.update(dict.fromkeys(fitting, way))
    if ways.get(COUNT) == "drop":
        raise UsageError(
            "A run can't go on without a count.", place=option("slot_policy"), expected="reset:count"
        )
    return ways


def _begun_anew(
    state: TrainState, policy: Mapping[str, Policy], done: list[Change]
) -> tuple[TrainState, dict[str, Policy]]:
    """Returns a state in which some parameters began anew, and what the policy says of all."""
    of_some = [key for key in policy if AT in key]
    for key in of_some:
        pattern, _, where = key.partition(AT)
        state = _some_anew(state, pattern, where, policy[key], done)
    return state, {key: way for key, way in policy.items() if key not in of_some}


def _some_anew(state: TrainState, pattern: str, where: str, way: Policy, done: list[Change]) -> TrainState:
    """Returns a state in which some parameters' slots, and their counts, have the values that the rule begins with."""
    paths = [
        path for group in state.optimizer.groups for path in group.paths if _is_meant(path, group, where)
    ]
    names = {name for path in paths for name in state.slots.get(path, {}) if fnmatchcase(name, pattern)}
    counts = fnmatchcase(COUNT, pattern)
    if way != "reset" or not paths or not (names or counts):
        labels = [group.label for group in state.optimizer.groups if group.label]
        raise UsageError(
            "No slot of these names and parameters can be reset.",
            place=option("slot_policy"),
            expected=f"reset:SLOT{AT}PATTERN, of parameters or of labels",
            found=f"{way}:{pattern}{AT}{where}",
            remedy=f"there are {some([*labels, *state.slots])}",
        )
    for name in names:
        state = state.per_optimizer(partial(_reset, name=name, done=done, only=paths))
    if counts:
        reason = f"the updates done by {len(paths)} parameters are 0 instead of {state.counts.updates}"
        done.append(Change(option("slot_policy"), reason, tuple(paths), Exactness.LOSSY))
        behind = {**state.counts.behind, **dict.fromkeys(paths, 0)}
        state = replace(state, counts=replace(state.counts, behind=behind))
    return state


def _is_meant(path: str, group: Group, where: str) -> bool:
    return fnmatchcase(path, where) or fnmatchcase(group.label or "", where)


def _slots_of(state: TrainState) -> tuple[str, ...]:
    """Returns the names of the slots that a state has, of parameters and of groups."""
    names = [name for tensors in state.slots.values() for name in tensors]
    return tuple(dict.fromkeys([*names, *(n for group in state.optimizer.groups for n in group.slots)]))


def _decided(state: TrainState, slot: str) -> bool:
    """Tells whether a slot is one of several forms of the same thing, by how its parameter is factored."""
    schemas = [load_schema(schema) for schema, _ in state.optimizer.kinds]
    decides = [spec.get("decides", {}) for decision in schemas for spec in decision.hyperparameters.values()]
    return any(slot in decision.get("factoring", ()) for decision in decides)


def _dropped(state: TrainState, names: Collection[str], done: list[Change]) -> TrainState:
    """Returns a state without some slots, and with what switches them off; refuses what a rule needs."""
    if not names:
        return state
    off = _switched_off(state, names)
    gone = [f"{path}/{n}" for path, tensors in state.slots.items() for n in tensors if n in names]
    switched = ", ".join(f"{key}={value}" for key, value in off.items())
    sentence = (
        "parameters go on without their float32 masters" if list(names) == [MASTER] else "the run goes on"
    )
    done.append(
        Change(
            option("slot_policy"),
            f"{', '.join(names)} dropped; {sentence}{f' with {switched}' if switched else ''}",
            tuple(gone),
            Exactness.LOSSY,
        )
    )

    def without_names(slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: slot for name, slot in slots.items() if name not in names}

    groups = tuple(replace(group, slots=without_names(group.slots)) for group in state.optimizer.groups)
    slots = {path: without_names(tensors) for path, tensors in state.slots.items()}
    state = replace(state, slots=slots, optimizer=replace(state.optimizer, groups=groups))
    return state.with_hyperparameters(**off) if off else state


def _switched_off(state: TrainState, names: Collection[str]) -> dict[str, Any]:
    """Returns the hyperparameters with which a rule goes on without some slots; refuses slots that it needs."""
    schema, faults = load_schema(state.optimizer.schema), Faults()
    off: dict[str, Any] = {}
    for name in names:
        switch = next((key for key in schema.hyperparameters if name in _existing(schema, key)), None)
        if switch is not None:
            together = {*_existing(schema, switch)} & {*_slots_of(state)} - {*names}
            if together:
                faults.add(f"goes with {', '.join(sorted(together))}", name)
            off[switch] = _off(schema, switch)
        elif name != MASTER:
            faults.add("the rule can't go on without it", name)
    faults.check(
        UsageError,
        f"Slots of {schema.name} can't be dropped",
        place=option("slot_policy"),
        remedy="reset begins them anew: --slot-policy " + ",".join(f"reset:{n}" for n in names),
    )
    return off


def _existing(schema: OptimizerSchema, name: str) -> tuple[str, ...]:
    return tuple(schema.hyperparameters[name].get("decides", {}).get("existence", ()))


def _off(schema: OptimizerSchema, name: str) -> Any:
    """Returns the value with which a hyperparameter is off."""
    spec = schema.hyperparameters[name]
    return None if "null" in spec["type"] else spec["off"][0] if "off" in spec else False


def _reset(
    state: TrainState, name: str, done: list[Change], only: Collection[str] | None = None
) -> TrainState:
    """Returns a state in which a slot has the value that the rule begins with, of all parameters or of some."""
    schema = load_schema(state.optimizer.schema)
    if name not in _slots_of(state):
        return state
    init = schema.slots[name].init
    reached = [path for path in state.slots if only is None or path in only]
    if name == MASTER:
        return _masters_reset(state, reached, done)
    if not isinstance(init, (int, float)):
        raise UsageError(
            f"{name} has no value to begin with: {init or 'it first exists with the value of its recurrence'}.",
            place=option("slot_policy"),
            found=f"reset:{name}",
            expected=f"keep:{name}",
        )
    groups = state.optimizer.groups if only is None else ()
    touched = [f"{path}/{name}" for path in reached if name in state.slots[path]]
    touched += [f"groups/{i}/{name}" for i, group in enumerate(groups) if name in group.slots]
    note = schema.data["slots"][name].get("note")
    done.append(
        Change(
            option("slot_policy"),
            f"{name} begins anew with {init:g}{f'. {note}' if note else ''}",
            tuple(touched),
            Exactness.LOSSY,
        )
    )
    return _with_slot_anew(state, name, init, reached, groups)


def _with_slot_anew(
    state: TrainState, name: str, init: float, reached: Sequence[str], groups: Sequence[Group]
) -> TrainState:
    """Returns a state in which a slot of the reached parameters and of the groups, if any, begins anew."""
    slots = {
        path: _slots_anew(tensors, name, init) if path in reached else tensors
        for path, tensors in state.slots.items()
    }
    changed = tuple(replace(group, slots=_slots_anew(group.slots, name, init)) for group in groups)
    optimizer = replace(state.optimizer, groups=changed or state.optimizer.groups)
    return replace(state, slots=slots, optimizer=optimizer)


def _slots_anew(tensors: Mapping[str, Tensor], name: str, init: float) -> dict[str, Tensor]:
    """Returns slots of which the named one has the value that the rule begins with."""
    return {
        slot: Filled(tensor.shape, tensor.dtype, init, "begins anew, as asked") if slot == name else tensor
        for slot, tensor in tensors.items()
    }


def _masters_reset(state: TrainState, reached: Sequence[str], done: list[Change]) -> TrainState:
    touched = [path for path in reached if MASTER in state.slots[path]]
    reason = "masters are the parameters, widened: the digits that only masters had are lost"
    done.append(Change(option("slot_policy"), reason, tuple(touched), Exactness.LOSSY))
    return replace(state, slots={**state.slots, **{path: _remastered(state, path) for path in reached}})


def _remastered(state: TrainState, path: str) -> dict[str, Tensor]:
    return {
        name: Cast(state.params[path], slot.dtype) if name == MASTER else slot
        for name, slot in state.slots[path].items()
    }


def _recounted(state: TrainState, done: list[Change]) -> TrainState:
    """Returns a state that has made no update, as its corrections of moments count; its schedule stays."""
    before = state.counts
    offset = any(group.hyperparameters.get("step_offset") for group in state.optimizer.groups)
    also = ", and step_offset with it" if offset else ""
    done.append(
        Change(
            option("slot_policy"),
            f"the updates done are 0 instead of {before.updates}{also}; the schedule stands at {before.schedule}",
            ("counts/updates",),
            Exactness.LOSSY,
        )
    )
    state = replace(state, counts=Counts(0, before.schedule))
    return state.with_step_offset(0) if offset else state


def _at_schedule(state: TrainState, asked: StepOffset, done: list[Change]) -> TrainState:
    if asked == "keep":
        return state
    at = 0 if asked == "reset" else asked
    stored = [
        schedule
        for schedule in run_of(state.extra).schedules
        if schedule.has_record and schedule.place != f"extra/{CALLED}"
    ]
    if stored:
        raise UsageError(
            "The checkpoint holds the schedule's own record, which counts its step in the system's own way.",
            place=option("schedule_step"),
            found=", ".join(f"{schedule.kind or 'a schedule'} ({schedule.place})" for schedule in stored),
            expected="keep",
            remedy="begin the schedule anew in the program, without loading its record",
        )
    done.append(
        Change(
            option("schedule_step"),
            f"the learning-rate schedule stands at {at} instead of {state.counts.schedule}",
            ("counts/schedule",),
            Exactness.LOSSY,
        )
    )
    return replace(state, counts=replace(state.counts, schedule=at, says_schedule=True))


def _rescaled(state: TrainState, scale: float, done: list[Change]) -> TrainState:
    """Returns the state of a run with gradients `scale` times as large from the start."""
    faults = Faults()
    state = state.per_optimizer(lambda part: _part_rescaled(part, scale, done, faults))
    state = replace(state, extra=_extra_rescaled(state, scale, done, faults))
    faults.check(UsageError, f"The loss can't be {scale:g} times as large", place=option("loss_scale"))
    return state


def _part_rescaled(state: TrainState, scale: float, done: list[Change], faults: Faults) -> TrainState:
    schema, powers = load_schema(state.optimizer.schema), dict[str, int]()

    def scaled(name: str, tensor: Tensor, group: Group, where: str) -> Tensor:
        powers[f"{where}/{name}"] = power = schema.gradient_power(name, _settings(state, group))
        return _times(tensor, scale, power, f"{where}/{name}", faults)

    slots, groups = {**state.slots}, []
    for i, group in enumerate(state.optimizer.groups):
        for path in group.paths:
            if path in slots:
                slots[path] = {n: scaled(n, slot, group, path) for n, slot in slots[path].items()}
        groups.append(
            replace(
                group, slots={n: scaled(n, slot, group, f"groups/{i}") for n, slot in group.slots.items()}
            )
        )
    done += _scalings(powers, scale, {name: name.rpartition("/")[2] for name in powers})
    if any(powers.values()) and (thresholds := _beside_gradients(state, schema)):
        reason = f"stays as it is, though it stands beside gradients {scale:g} times as large: {thresholds}"
        done.append(Change(option("loss_scale"), reason, (), Exactness.BITWISE))
    optimizer = replace(state.optimizer, groups=tuple(groups))
    return replace(state, slots=slots, optimizer=optimizer)


def _extra_rescaled(state: TrainState, scale: float, done: list[Change], faults: Faults) -> Any:
    """Returns what lies beside an optimizer, where gradients may wait for their update; says what nobody knows of."""
    paths = {path: leaf for path, leaf in walk(state.extra) if isinstance(leaf, Tensor)}
    tensors = {"/".join(map(str, ("extra", *path))): (path, leaf) for path, leaf in paths.items()}
    forms = {name: form for name in tensors for form in GRADIENTS if fnmatchcase(name, form)}
    powers = {name: GRADIENTS[form] for name, form in forms.items()}
    rescaled = {
        tensors[name][0]: _times(tensors[name][1], scale, power, name, faults)
        for name, power in powers.items()
    }
    done += _scalings(powers, scale, {name: form.strip("*/") for name, form in forms.items()})
    others = {name: leaf for name, (_, leaf) in tensors.items() if name not in powers}
    if doubtful := _doubtful(others, run_of(state.extra)):
        reason = "as it was: nothing tells whether the scale of the loss is in it"
        done.append(Change(option("loss_scale"), reason, doubtful, Exactness.LOSSY))
    return with_leaves(state.extra, rescaled)


def _doubtful(tensors: Mapping[str, Tensor], run: RunState) -> tuple[str, ...]:
    """Returns the tensors that may be gradients, and that no known part of a run explains."""
    explained = (f"extra/{BUFFERS}/", *(f"{part.place}/" for part in run.parts))
    return tuple(
        name
        for name, tensor in tensors.items()
        if not f"{name}/".startswith(explained) and _may_be_gradients(tensor)
    )


def _may_be_gradients(tensor: Tensor) -> bool:
    return bool(tensor.shape) and tensor.dtype.name in FLOATS


def _times(tensor: Tensor, scale: float, power: int, name: str, faults: Faults) -> Tensor:
    """Returns a tensor of gradients to some power under another scale; notices where its dtype can't have it."""
    if not power or (isinstance(tensor, Filled) and not tensor.value):
        return tensor
    factor, (least, most) = _power_of(scale, power), _factors(tensor.dtype)
    if not least <= factor <= most:
        limits = f"its {tensor.dtype.name} takes factors from {least:.3g} to {most:.3g}"
        faults.add(f"would be times {factor:g}, and {limits}", name)
    return Scaled(tensor, factor)


def _scalings(powers: Mapping[str, int], scale: float, called: Mapping[str, str]) -> Iterator[Change]:
    """Yields what a scale does to tensors, one change for each power of gradients; `called` is what each is."""
    exact = math.frexp(scale)[0] == 0.5
    how = "a power of two: no digit is lost inside the dtype's range" if exact else "each rounded once"
    for power in sorted({*powers.values()}):
        names = tuple(name for name in powers if powers[name] == power)
        kinds = ", ".join(dict.fromkeys(called[name] for name in names))
        if power:
            reason = f"times {_power_of(scale, power):g}, the loss's scale to the power {power} ({how})"
            exactness = Exactness.BITWISE if exact else Exactness.ROUNDING
            yield Change(option("loss_scale"), f"{kinds} {reason}", names, exactness)
        else:
            reason = "as they are: the scale of the loss is not in them"
            yield Change(option("loss_scale"), f"{kinds} {reason}", (), Exactness.BITWISE)


def _power_of(scale: float, power: int) -> float:
    """Returns a power of a scale in float64: infinite, or 0, where that can't hold it."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float64(scale) ** power)


def _factors(dtype: DType) -> tuple[float, float]:
    """Returns the least and the largest number that a slot may be times: beyond them 1 becomes 0 or infinite.

    The least is also one that float64, in which products are made, has in full precision. Whole numbers take only 1.
    """
    if dtype.kind in "biu":
        return 1.0, 1.0
    limits = float_info(dtype)
    return max(float(limits.smallest_subnormal), sys.float_info.min), float(limits.max)


def _settings(state: TrainState, group: Group) -> dict[str, Any]:
    schema, variant = load_schema(state.optimizer.schema), state.optimizer.variant
    usual = {} if variant is None else schema.settings(variant)
    return {**{name: spec.get("if_absent") for name, spec in schema.hyperparameters.items()}, **usual} | dict(
        group.hyperparameters
    )


def _beside_gradients(state: TrainState, schema: OptimizerSchema) -> str:
    """Returns the hyperparameters that are compared with gradients, or added to their moments, with their values."""
    names = [name for name, spec in schema.hyperparameters.items() if spec.get("beside_gradients")]
    settings = dict.fromkeys(
        (name, value)
        for group in state.optimizer.groups
        for name in names
        if (value := _settings(state, group).get(name))
    )
    return ", ".join(f"{name}={value!r}" for name, value in settings)


def _slots_cast(state: TrainState, asked: Mapping[str, str], done: list[Change]) -> TrainState:
    dtypes = _asked_dtypes(state, asked)
    slots = {
        path: {n: cast(slot, dtypes.get(n, slot.dtype)) for n, slot in tensors.items()}
        for path, tensors in state.slots.items()
    }
    for name, dtype in dtypes.items():
        cast_slots = {
            f"{path}/{name}": tensors[name] for path, tensors in state.slots.items() if name in tensors
        }
        done += _cast_changes("slot_dtype", name, cast_slots, dtype)
    changed_state = replace(state, slots=slots)
    return changed_state.per_optimizer(lambda part: _told_dtypes(part, dtypes))


def _asked_dtypes(state: TrainState, asked: Mapping[str, str]) -> dict[str, DType]:
    """Returns the dtype that each slot shall have; refuses patterns of which no slot can have it."""
    samples = {name: slot for holder in state.optimizer.groups for name, slot in holder.slots.items()}
    for tensors in state.slots.values():
        samples.update(tensors)
    faults, dtypes = Faults(), dict[str, DType]()
    for pattern, named in asked.items():
        fitting = [name for name in samples if fnmatchcase(name, pattern)]
        if not fitting:
            faults.add(f"is no slot of the state, which has {', '.join(samples)}", pattern)
        kept = {name: why for name in fitting if (why := _keeps_dtype(state, name, samples[name].dtype))}
        if len(kept) == len(fitting):
            faults += [(f"{why} isn't rounded to {named}", name) for name, why in kept.items()]
        dtypes.update({name: DTYPES[named] for name in fitting if name not in kept})
    faults.check(UsageError, "Slots can't have such a dtype", place=option("slot_dtype"))
    return dtypes


def _keeps_dtype(state: TrainState, name: str, dtype: DType) -> str:
    """Returns why a slot keeps its dtype whatever is asked for; an empty text if it can have another."""
    if dtype.name not in FLOATS:
        return f"counts, in {dtype.name}: a count"
    if name == MASTER:
        return "is the parameters in full precision: a master"
    if any(name in group.slots for group in state.optimizer.groups):
        return "belongs to a whole group, whose rule sets its dtype: it"
    return ""


def _told_dtypes(state: TrainState, dtypes: Mapping[str, DType]) -> TrainState:
    """Returns a state whose hyperparameters say the dtypes that its slots have by now, where one decides them."""
    for name, spec in load_schema(state.optimizer.schema).hyperparameters.items():
        decided = [slot for slot in spec.get("decides", {}).get("dtype", ()) if slot in dtypes]
        if decided and any(name in group.hyperparameters for group in state.optimizer.groups):
            state = state.with_hyperparameters(**{name: dtypes[decided[0]].name})
    return state


def _params_cast(state: TrainState, dtype: DType, done: list[Change]) -> TrainState:
    floats = {path: param for path, param in state.params.items() if param.dtype.name in FLOATS}
    done += _cast_changes("param_dtype", "parameters", floats, dtype)
    return replace(
        state, params={**state.params, **{p: cast(floating, dtype) for p, floating in floats.items()}}
    )


def _cast_changes(name: str, what: str, tensors: Mapping[str, Tensor], target: DType) -> Iterator[Change]:
    """Yields what a cast does to tensors, one change for each dtype that they come from."""
    half = float(float_info(target).eps) / 2
    sources = dict.fromkeys(tensor.dtype for tensor in tensors.values())
    for source in (source_dtype for source_dtype in sources if source_dtype != target):
        if widens(source, target):
            does, exactness = "every value stays", Exactness.BITWISE
        else:
            does = f"rounded from {source.name}, each is off by up to {half:g} of itself"
            exactness = Exactness.LOSSY
        names = tuple(path for path, tensor in tensors.items() if tensor.dtype == source)
        yield Change(option(name), f"{what} in {target.name}: {does}", names, exactness)
