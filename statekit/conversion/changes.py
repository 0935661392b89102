"""What a user wants changed of a run as it goes on: slots, counts, dtypes, the scale of its loss.

Each change is asked for by name, and what it does is said in a sentence with the names that it touches. Whatever reads
such wishes, the command line, `statekit.convert` or a `load_optimizer`, goes through `Changes.of`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from statekit.conversion.contracts import Encoded
from statekit.errors import Faults, UsageError, meant, some
from statekit.state.exactness import Exactness
from statekit.state.run import BESIDE, SIDE_BY_SIDE, run_of
from statekit.state.schedules.called import KEY as CALLED
from statekit.state.schema import WEIGHTS, OptimizerSchema, load_schema
from statekit.state.stored_params import MASTER, check_known, decoded
from statekit.state.train_state import Counts, Group, Optimizer, StepOffset, TrainState
from statekit.tensors.tensor import DTYPES, Cast, DType, Filled, Tensor, blocks, float_info, widens
from statekit.tensors.tree import without
from statekit.tensors.views import Narrowed, Scaled, cast

Policy: TypeAlias = Literal["keep", "drop", "reset"]
POLICIES = ("keep", "drop", "reset")
COUNT = "count"
"""What `reset` of a slot policy may name beside slots: the updates done, from which bias corrections count."""
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_OF_RUN = (BESIDE, SIDE_BY_SIDE, "param_groups", CALLED)
"""What `extra` holds of a run that weights alone leave behind."""


@dataclass(frozen=True)
class Changes:
    """What a user wants changed.

    Attributes:
        schedule_step: Where the learning-rate schedule stands: `keep`, `reset` (at its beginning), or a number.
        slot_policy: Pattern of canonical slot names, or `count` -> `keep`, `drop` or `reset`; later ones win.
        params_only: Whether the optimizer is left behind.
        state_only: Whether the parameters are left behind.
        drop_slots_of: Patterns of parameters that are frozen: they keep their values, and nothing moves them.
        param_dtype: The dtype of parameters; as they are if None.
        slot_dtype: Pattern of slot names -> their dtype.
        loss_scale: How many times as large gradients are from now on.
        init_missing: A file of the target's model: what it has and the source lacks begins anew, with its values.
    """

    schedule_step: StepOffset = "keep"
    slot_policy: Mapping[str, Policy] = field(default_factory=dict)
    params_only: bool = False
    state_only: bool = False
    drop_slots_of: tuple[str, ...] = ()
    param_dtype: str | None = None
    slot_dtype: Mapping[str, str] = field(default_factory=dict)
    loss_scale: float | None = None
    init_missing: Path | None = None

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Changes | None:
        """Returns what somebody says, as Python or the command line has it; None if that is nothing.

        A policy is `reset:v`, `drop:m` or `keep`, several of them joined by commas or in a list, or a mapping; a
        slot's dtype `bfloat16`, `m=bfloat16`, or a mapping.

        Args:
            said: Field -> value.

        Raises:
            UsageError: A value makes no sense; lists every one.

        Example:
            >>> Changes.of({"slot_policy": "reset:v*,drop:m"}).slot_policy
            {'v*': 'reset', 'm': 'drop'}
        """
        faults = Faults()
        values = {name: READ[name](name, value, faults) for name, value in said.items()}
        faults.check(UsageError, "What shall be changed of the run can't be read")
        made = cls(**values)
        if made == cls():
            return None
        if made.params_only and (others := [name for name in made._asked() if name not in _OF_PARAMS]):
            raise UsageError(
                "Without its slots nothing can be changed of an optimizer.",
                place="--params-only",
                found=", ".join(map(option, others)),
                remedy="leave it out",
            )
        return made

    def _asked(self) -> list[str]:
        usual = Changes()
        return [one.name for one in fields(self) if getattr(self, one.name) != getattr(usual, one.name)]

    def to_json(self) -> dict[str, Any]:
        """Returns what was asked for, as it stands in a plan."""
        values = {name: getattr(self, name) for name in self._asked()}
        return {
            name: dict(value)
            if isinstance(value, Mapping)
            else list(value)
            if isinstance(value, tuple)
            else value.name  # a plan says nothing of this machine
            if isinstance(value, Path)
            else value
            for name, value in values.items()
        }


_OF_PARAMS = ("params_only", "param_dtype")


def patterns(name: str, value: Any) -> tuple[str, ...]:
    """Returns patterns of names, as an option has them: one, or several.

    Raises:
        UsageError: They aren't text.
    """
    faults = Faults()
    read = _patterns(name, value, faults)
    faults.check(UsageError, "What shall be changed of the run can't be read")
    return read


def option(name: str) -> str:
    """Returns what the command line calls a field."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Change:
    """Something that was changed as it was asked for.

    Attributes:
        asked: The option.
        said: What was done, and what follows from it, in a sentence.
        names: The parameters, slots or counts that it touches, by canonical names.
        exactness: How exactly the run goes on because of it, had nobody asked.
    """

    asked: str
    said: str
    names: tuple[str, ...]
    exactness: Exactness

    def __str__(self) -> str:
        return f"{self.asked}: {self.said}" + (f" ({some(self.names)})" if self.names else "")

    def to_json(self) -> dict[str, Any]:
        """Returns the change as it stands in a plan."""
        return {
            "asked": self.asked,
            "said": self.said,
            "names": list(self.names),
            "exactness": self.exactness.name.lower(),
        }


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
    if state.optimizer.schema == WEIGHTS and asked._asked() != ["param_dtype"] and not asked.params_only:
        raise UsageError(
            "The source holds weights alone: there are no slots and no counts to be changed.",
            place=", ".join(map(option, asked._asked())),
            expected=option("param_dtype"),
        )
    done: list[Change] = []
    if asked.params_only:
        check_known(state, makers)
        state = _params_only(state.each(decoded), done)
    state = _frozen(state, asked.drop_slots_of, done)
    state = _by_policy(state, asked.slot_policy, done)
    state = _at_schedule(state, asked.schedule_step, done)
    if asked.loss_scale is not None:
        state = _rescaled(state, asked.loss_scale, done)
    if asked.slot_dtype:
        state = _slots_cast(state, asked.slot_dtype, done)
    if asked.param_dtype is not None:
        state = _params_cast(state, DTYPES[asked.param_dtype], done)
    return state, tuple(done)


def without_model(encoded: Encoded, container: str, state: TrainState) -> tuple[Encoded, Change]:
    """Returns a state in native form without its parameters, and what that leaves behind.

    Args:
        encoded: The state in native form.
        container: The target's.
        state: The state.

    Raises:
        UsageError: The target has no form of an optimizer's state alone.
    """
    place = encoded.parts.get("model")
    if container != "torch" or place is None:
        raise UsageError(
            "The target has no form of an optimizer's state without its parameters.",
            place=option("state_only"),
            expected="--to torch, and --layout torch-optim, torch-fqn or torch-fqn-flat",
            found=container,
        )

    def alone(form: Encoded) -> Encoded:
        parts = {name: keys for name, keys in form.parts.items() if name != "model"}
        return replace(form, tree=without(form.tree, form.parts["model"]), parts=parts)

    said = f"{len(state.params)} parameters are left behind: the model has them from elsewhere"
    made = Change(
        option("state_only"), said, tuple(f"params/{path}" for path in state.params), Exactness.LOSSY
    )
    return alone(encoded), made


def _params_only(state: TrainState, done: list[Change]) -> TrainState:
    slots = [f"{path}/{name}" for path, tensors in state.slots.items() for name in tensors]
    slots += [f"groups/{i}/{n}" for i, group in enumerate(state.optimizer.groups) for n in group.slots]
    kept = {key: part for key, part in state.extra.items() if key not in (*_OF_RUN, "buffers")}
    beside = [f"extra/{key}" for key in state.extra if key in _OF_RUN]
    buffers: Mapping[str, Tensor] = state.extra.get("buffers") or {}
    done.append(
        Change(
            option("params_only"),
            f"the optimizer is left behind, {len(slots)} slots and all counts; the next update is a new one's first",
            (*slots, *beside),
            Exactness.LOSSY,
        )
    )
    at = state.counts.schedule
    params = {**state.params, **buffers}
    return TrainState(params, {}, Optimizer(WEIGHTS, None, ()), Counts(at, at), {}, kept)


def _frozen(state: TrainState, patterns: Iterable[str], done: list[Change]) -> TrainState:
    moved = [path for group in state.optimizer.groups for path in group.paths]
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
    groups = tuple(_without(group, gone) for group in state.optimizer.groups)
    kinds = [state.optimizer.kind(group) for group in state.optimizer.groups]
    return replace(
        state,
        slots={path: tensors for path, tensors in state.slots.items() if path not in gone},
        rules={path: rule for path, rule in state.rules.items() if path not in gone},
        optimizer=Optimizer.of(groups, kinds),
        counts=replace(
            state.counts, behind={path: n for path, n in state.counts.behind.items() if path not in gone}
        ),
    )


def _without(group: Group, gone: Collection[str]) -> Group:
    """Returns a group without some of its parameters, and without what was said of them by path."""
    said = {
        name: {key: one for key, one in value.items() if key not in gone}
        if isinstance(value, Mapping)
        else value
        for name, value in group.hyperparameters.items()
    }
    return replace(group, paths=tuple(p for p in group.paths if p not in gone), hyperparameters=said)


def _by_policy(state: TrainState, policy: Mapping[str, Policy], done: list[Change]) -> TrainState:
    ways: dict[str, Policy] = {}
    known = _slots_of(state)
    for pattern, way in policy.items():
        names = [name for name in (*known, COUNT) if fnmatchcase(name, pattern)]
        if pattern != COUNT and COUNT in names:
            names.remove(COUNT)
        if not names:
            raise UsageError(
                "The state has no slot of that name.",
                place=option("slot_policy"),
                found=pattern,
                expected=", ".join((*known, COUNT)),
                remedy=meant(pattern, (*known, COUNT)),
            )
        ways.update(dict.fromkeys(names, way))
    if ways.get(COUNT) == "drop":
        raise UsageError(
            "A run can't go on without a count.", place=option("slot_policy"), expected="reset:count"
        )
    dropped = [name for name, way in ways.items() if way == "drop"]
    reset = [name for name, way in ways.items() if way == "reset" and name != COUNT]
    if dropped:
        state = state.each(lambda part: _dropped(part, [n for n in dropped if n in _slots_of(part)], done))
    for name in reset:
        state = state.each(partial(_reset, name=name, done=done))
    if reset and ways.get(COUNT) != "reset":
        same = [name for name in known if name not in reset and name not in dropped and _decided(state, name)]
        if any(_decided(state, name) for name in reset) and same:
            done.append(
                Change(
                    option("slot_policy"),
                    f"{', '.join(same)} stay: 'reset:v*' means all second moments",
                    (),
                    Exactness.BITWISE,
                )
            )
    return _recounted(state, done) if ways.get(COUNT) == "reset" else state


def _slots_of(state: TrainState) -> tuple[str, ...]:
    """Returns the names of the slots that a state has, of parameters and of groups."""
    names = [name for tensors in state.slots.values() for name in tensors]
    return tuple(dict.fromkeys([*names, *(n for group in state.optimizer.groups for n in group.slots)]))


def _decided(state: TrainState, slot: str) -> bool:
    """Tells whether a slot is one of several forms of the same thing, by how its parameter is factored."""
    schemas = [load_schema(schema) for schema, _ in state.optimizer.kinds]
    decides = [spec.get("decides", {}) for one in schemas for spec in one.hyperparameters.values()]
    return any(slot in one.get("factoring", ()) for one in decides)


def _dropped(state: TrainState, names: Collection[str], done: list[Change]) -> TrainState:
    """Returns a state without some slots, and with what switches them off; refuses what a rule needs."""
    schema, faults = load_schema(state.optimizer.schema), Faults()
    off: dict[str, Any] = {}
    for name in names:
        switch = next((key for key in schema.hyperparameters if name in _existing(schema, key)), None)
        if switch is None:
            if name != MASTER:
                faults.add("the rule can't go on without it", name)
            continue
        together = [one for one in _existing(schema, switch) if one in _slots_of(state) and one not in names]
        if together:
            faults.add(f"goes with {', '.join(together)}", name)
        off[switch] = _off(schema, switch)
    faults.check(
        UsageError,
        f"Slots of {schema.name} can't be dropped",
        place=option("slot_policy"),
        remedy="reset begins them anew: --slot-policy " + ",".join(f"reset:{n}" for n in names),
    )
    if not names:
        return state
    gone = [f"{path}/{n}" for path, tensors in state.slots.items() for n in tensors if n in names]
    switched = ", ".join(f"{key}={value}" for key, value in off.items())
    what = "parameters go on without their float32 masters" if list(names) == [MASTER] else "the run goes on"
    done.append(
        Change(
            option("slot_policy"),
            f"{', '.join(names)} dropped; {what}{f' with {switched}' if switched else ''}",
            tuple(gone),
            Exactness.LOSSY,
        )
    )
    groups = tuple(
        replace(group, slots={n: slot for n, slot in group.slots.items() if n not in names})
        for group in state.optimizer.groups
    )
    slots = {
        path: {n: slot for n, slot in tensors.items() if n not in names}
        for path, tensors in state.slots.items()
    }
    state = replace(state, slots=slots, optimizer=replace(state.optimizer, groups=groups))
    return state.with_hyperparameters(**off) if off else state


def _existing(schema: OptimizerSchema, name: str) -> tuple[str, ...]:
    return tuple(schema.hyperparameters[name].get("decides", {}).get("existence", ()))


def _off(schema: OptimizerSchema, name: str) -> Any:
    """Returns the value with which a hyperparameter is off."""
    spec = schema.hyperparameters[name]
    return None if "null" in spec["type"] else spec["off"][0] if "off" in spec else False


def _reset(state: TrainState, name: str, done: list[Change]) -> TrainState:
    """Returns a state in which a slot has the value that the rule begins with."""
    schema = load_schema(state.optimizer.schema)
    if name not in _slots_of(state):
        return state
    init = schema.slots[name].init
    if name == MASTER:
        state = replace(state, slots={path: _remastered(state, path) for path in state.slots})
        touched = [path for path, tensors in state.slots.items() if name in tensors]
        said = "masters are the parameters, widened: the digits that only masters had are lost"
        done.append(Change(option("slot_policy"), said, tuple(touched), Exactness.LOSSY))
        return state
    if not isinstance(init, (int, float)):
        raise UsageError(
            f"{name} has no value to begin with: {init or 'it first exists with the value of its recurrence'}.",
            place=option("slot_policy"),
            found=f"reset:{name}",
            expected=f"keep:{name}",
        )
    touched = [f"{path}/{name}" for path, tensors in state.slots.items() if name in tensors]
    touched += [f"groups/{i}/{name}" for i, one in enumerate(state.optimizer.groups) if name in one.slots]
    note = schema.data["slots"][name].get("note")
    done.append(
        Change(
            option("slot_policy"),
            f"{name} begins anew with {init:g}{f'. {note}' if note else ''}",
            tuple(touched),
            Exactness.LOSSY,
        )
    )

    def anew(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            n: Filled(slot.shape, slot.dtype, init, "begins anew, as asked") if n == name else slot
            for n, slot in tensors.items()
        }

    groups = tuple(replace(group, slots=anew(group.slots)) for group in state.optimizer.groups)
    return replace(
        state,
        slots={path: anew(tensors) for path, tensors in state.slots.items()},
        optimizer=replace(state.optimizer, groups=groups),
    )


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
        one for one in run_of(state.extra).schedules if one.at is not None and one.place != f"extra/{CALLED}"
    ]
    if stored:
        raise UsageError(
            "The checkpoint holds the schedule's own record, which says where it stands in its system's own way.",
            place=option("schedule_step"),
            found=", ".join(f"{one.kind or 'a schedule'} at {one.at} ({one.place})" for one in stored),
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
    """Returns a state as a run has it whose gradients were `scale` times as large from the start."""
    waiting = [
        one.place
        for one in run_of(state.extra).parts
        if one.what == "accumulation" and "acc_grads" in one.place
    ]
    if waiting:
        raise UsageError(
            "The checkpoint holds gradients that were summed under the old scale.",
            place=option("loss_scale"),
            found=", ".join(waiting),
            remedy="save the run after an update, not between two",
        )
    faults = Faults()
    state = state.each(lambda part: _part_rescaled(part, scale, done, faults))
    faults.check(UsageError, f"The loss can't be {scale:g} times as large", place=option("loss_scale"))
    return state


def _part_rescaled(state: TrainState, scale: float, done: list[Change], faults: Faults) -> TrainState:
    schema, powers = load_schema(state.optimizer.schema), dict[int, dict[str, None]]()

    def scaled(name: str, tensor: Tensor, group: Group, where: str) -> Tensor:
        power = schema.gradient_power(name, _settings(state, group))
        powers.setdefault(power, {})[f"{where}/{name}"] = None
        begins = isinstance(tensor, Filled) and not tensor.value
        if not power or begins:
            return tensor
        factor, (least, most) = _power_of(scale, power), _factors(tensor.dtype)
        if not least <= factor <= most:
            limits = f"its {tensor.dtype.name} takes factors from {least:.3g} to {most:.3g}"
            faults.add(f"would be times {factor:g}, and {limits}", f"{where}/{name}")
        return Scaled(tensor, factor)

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
    exact = math.frexp(scale)[0] == 0.5
    how = "a power of two: no digit is lost inside the dtype's range" if exact else "each rounded once"
    for power in sorted(powers):
        named = dict.fromkeys(name.rpartition("/")[2] for name in powers[power])
        what = (
            f"times {_power_of(scale, power):g}, the loss's scale to the power {power}"
            if power
            else "as they are"
        )
        done.append(
            Change(
                option("loss_scale"),
                f"{', '.join(named)} {what}{f' ({how})' if power else ': the scale of the loss is not in them'}",
                tuple(powers[power]) if power else (),
                (Exactness.BITWISE if exact or not power else Exactness.ROUNDING),
            )
        )
    if any(powers) and (beside := _beside_gradients(state, schema)):
        said = f"stays as it is, though it stands beside gradients {scale:g} times as large: {beside}"
        done.append(Change(option("loss_scale"), said, (), Exactness.BITWISE))
    optimizer = replace(state.optimizer, groups=tuple(groups))
    return replace(state, slots=slots, optimizer=optimizer)


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
    said = dict.fromkeys(
        (name, value)
        for group in state.optimizer.groups
        for name in names
        if (value := _settings(state, group).get(name))
    )
    return ", ".join(f"{name}={value!r}" for name, value in said)


def _slots_cast(state: TrainState, asked: Mapping[str, str], done: list[Change]) -> TrainState:
    known = {**{n: s for t in state.slots.values() for n, s in t.items()}}
    known |= {n: slot for group in state.optimizer.groups for n, slot in group.slots.items()}
    faults, dtypes = Faults(), dict[str, DType]()
    for pattern, named in asked.items():
        fitting = [name for name in known if fnmatchcase(name, pattern)]
        if not fitting:
            faults.add(f"is no slot of the state, which has {', '.join(known)}", pattern)
        kept = {name: why for name in fitting if (why := _keeps_dtype(state, name, known[name].dtype))}
        if len(kept) == len(fitting):
            faults += [(f"{why} isn't rounded to {named}", name) for name, why in kept.items()]
        dtypes.update({name: DTYPES[named] for name in fitting if name not in kept})
    faults.check(UsageError, "Slots can't have such a dtype", place=option("slot_dtype"))
    slots = {
        path: {n: cast(slot, dtypes.get(n, slot.dtype)) for n, slot in tensors.items()}
        for path, tensors in state.slots.items()
    }
    for name, dtype in dtypes.items():
        each = {f"{path}/{name}": tensors[name] for path, tensors in state.slots.items() if name in tensors}
        done += _cast_changes("slot_dtype", name, each, dtype)
    changed_state = replace(state, slots=slots)
    return changed_state.each(lambda part: _told_dtypes(part, dtypes))


def _keeps_dtype(state: TrainState, name: str, dtype: DType) -> str:
    """Returns why a slot keeps its dtype whatever is asked for; an empty text if it can have another."""
    if dtype.name not in _FLOATS:
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
    floats = {path: param for path, param in state.params.items() if param.dtype.name in _FLOATS}
    done += _cast_changes("param_dtype", "parameters", floats, dtype)
    return replace(state, params={**state.params, **{p: cast(one, dtype) for p, one in floats.items()}})


def _cast_changes(name: str, what: str, tensors: Mapping[str, Tensor], target: DType) -> Iterator[Change]:
    """Yields what a cast does to tensors, one change for each dtype that they come from."""
    half = float(float_info(target).eps) / 2
    sources = dict.fromkeys(tensor.dtype for tensor in tensors.values())
    for source in (one for one in sources if one != target):
        if widens(source, target):
            does, exactness = "every value stays", Exactness.BITWISE
        else:
            does = f"rounded from {source.name}, each is off by up to {half:g} of itself"
            exactness = Exactness.LOSSY
        names = tuple(path for path, tensor in tensors.items() if tensor.dtype == source)
        yield Change(option(name), f"{what} in {target.name}: {does}", names, exactness)


@dataclass(frozen=True)
class Measured:
    """How far what was rounded because somebody asked for it is from what it was made of.

    Attributes:
        asked: The operation: `narrowed` or `scaled`.
        values: How many values went through it.
        rounded: How many of them came out as other numbers.
        largest: The largest difference among those that stayed finite and didn't become 0, relative to the exact value.
        lost: How many became infinite, or 0.
    """

    asked: str
    values: int = 0
    rounded: int = 0
    largest: float = 0.0
    lost: int = 0

    def __str__(self) -> str:
        said = f"{self.asked}: {self.rounded} of {self.values} values are other numbers"
        largest = f", by up to {self.largest:.3g} of themselves" if self.largest else ""
        return f"{said}{largest}{f'; {self.lost} became infinite or 0' if self.lost else ''}"

    def and_block(self, block: Any, exact: Any) -> Measured:
        """Returns it with a block of values beside what they would be exactly, in float64."""
        values = block.astype(np.float64)
        other = values != exact
        other &= ~(np.isnan(values) & np.isnan(exact))
        lost = other & (np.isinf(values) | (values == 0))
        near = other & ~lost
        largest = float(np.max(np.abs(values[near] / exact[near] - 1))) if near.any() else 0.0
        return replace(
            self,
            values=self.values + values.size,
            rounded=self.rounded + int(other.sum()),
            largest=max(self.largest, largest),
            lost=self.lost + int(lost.sum()),
        )


def measured_in(tensors: Iterable[Tensor]) -> tuple[Measured, ...]:
    """Reads what changes rounded in some tensors, and returns how far it is off; nothing else is read."""
    made: dict[str, Measured] = {}
    for one in {id(one): one for tensor in tensors for one in _rounded_in(tensor)}.values():
        name, factor = ("scaled", one.factor) if isinstance(one, Scaled) else ("narrowed", 1.0)
        so_far = made.get(name, Measured(name))
        for index in blocks(one):
            exact = one.tensor.read(index).astype(np.float64) * factor
            so_far = so_far.and_block(one.read(index), exact)
        made[name] = so_far
    return tuple(made.values())


def _rounded_in(tensor: Any) -> Iterator[Narrowed | Scaled]:
    """Yields what changes rounded among all that a tensor is made of."""
    if isinstance(tensor, (Narrowed, Scaled)):
        yield tensor
    if is_dataclass(tensor):
        for one in fields(tensor):
            part = getattr(tensor, one.name)
            for inner in part if isinstance(part, (list, tuple)) else (part,):
                yield from _rounded_in(inner)


def _step(name: str, value: Any, faults: Faults) -> StepOffset:
    if value in ("keep", "reset") or (type(value) is int and value >= 0):
        return value  # type: ignore[no-any-return]  # one of the two words, or a number
    faults.add(f"is {value!r:.80}, expected keep, reset, or a number from 0", option(name))
    return "keep"


def _policies(name: str, value: Any, faults: Faults) -> dict[str, Policy]:
    ways: dict[str, Policy] = {}
    for slot, way in _pairs(name, value, ":", faults):
        if way not in POLICIES or (slot is None and way != "keep"):
            faults.add(f"is {way!r:.80}, expected keep, drop:SLOT or reset:SLOT", option(name))
        elif slot is not None:
            ways[slot] = way
    return ways


def _slot_dtypes(name: str, value: Any, faults: Faults) -> dict[str, str]:
    dtypes = {}
    for slot, dtype in _pairs(name, value, "=", faults):
        if (known := _dtype(name, dtype, faults)) is not None:
            dtypes[slot or "*"] = known
    return dtypes


def _pairs(name: str, value: Any, between: str, faults: Faults) -> Iterator[tuple[str | None, Any]]:
    """Yields slot and what is said of it; of all slots, None."""
    if isinstance(value, Mapping):
        yield from ((str(slot), said) for slot, said in value.items())
        return
    for part in (one for text in _listed(name, value, faults) for one in str(text).split(",")):
        first, said, second = part.strip().partition(between)
        if between == ":":
            yield (second, first) if said else (None, first)
        else:
            yield (first, second) if said else (None, first)


def _listed(name: str, value: Any, faults: Faults) -> list[Any]:
    """Returns what is said in one text or in several; nothing if that is None."""
    if value is None or isinstance(value, str):
        return [value] if value else []
    if isinstance(value, Iterable):
        return list(value)
    faults.add(f"is {value!r:.80}, expected text, or a list of it", option(name))
    return []


def _dtype(name: str, value: Any, faults: Faults) -> str | None:
    if value is None or value in _FLOATS:
        return None if value is None else str(value)
    faults.add(f"is {value!r:.80}, expected {', '.join(_FLOATS)}", option(name))
    return None


def _flag(name: str, value: Any, faults: Faults) -> bool:
    if not isinstance(value, bool):
        faults.add(f"is {value!r:.80}, expected true or false", option(name))
    return value is True


def _patterns(name: str, value: Any, faults: Faults) -> tuple[str, ...]:
    each = _listed(name, value, faults)
    if not all(isinstance(one, str) and one for one in each):
        faults.add("expected patterns of names", option(name))
    return tuple(map(str, each))


def _scale(name: str, value: Any, faults: Faults) -> float | None:
    if value is None:
        return None
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not known or not 0 < value <= sys.float_info.max:
        faults.add(f"is {value!r:.80}, expected a number above 0", option(name))
        return None
    return float(value)


def _path(name: str, value: Any, faults: Faults) -> Path | None:
    if isinstance(value, (str, PathLike)):
        return Path(value)
    if value is not None:
        faults.add(f"is {value!r:.80}, expected the path of a file", option(name))
    return None


READ: Mapping[str, Any] = {
    "schedule_step": _step,
    "slot_policy": _policies,
    "params_only": _flag,
    "state_only": _flag,
    "drop_slots_of": _patterns,
    "param_dtype": _dtype,
    "slot_dtype": _slot_dtypes,
    "loss_scale": _scale,
    "init_missing": _path,
}
"""How each field of `Changes` is read from what somebody says."""
