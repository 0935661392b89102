"""What the next update of each group will do with the slots that it finds: measured on the rule's own step.

A parameter of a few elements, its gradient 1 everywhere, goes through the step that statekit itself makes, with the
group's hyperparameters at the run's count. What comes out tells the decay of the second moment, and how large a first
update is whose slots begin anew; no formula of an optimizer stands here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from statekit.arrays.numpy_backend import NumpyBackend
from statekit.conversion.changing.changes import COUNT, Changes, option
from statekit.conversion.resume import next_update
from statekit.errors import Faults, StateError, StatekitError, UsageError
from statekit.optim.run import counts_apart, move_group, settled_group, steps_for
from statekit.optim.steps import Arrays, Scene, Steps
from statekit.state.options import RATE_NAMES
from statekit.state.run import Schedule
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.state.train_state import Axis, Group, Rule, TrainState
from statekit.tensors.tensor import DTYPES, DType
from statekit.tensors.tree import to_json

State = Mapping[str, Any]
RATE = 0.01
SIDE = 2
"""How long each axis of the parameter is on which rules are measured."""
SETTLED = 200
"""Updates in a row by which momentum has come to rest, as far as a sentence tells."""
TRIALS = (0.25, 0.5)
"""Values for a hyperparameter that is not given: what comes out the same with both doesn't depend on it."""
OFF_BY = 0.05
"""A first update that differs less from a settled run's is not worth a sentence."""


@dataclass(frozen=True)
class Trial:
    """A rule and a small parameter to try it on."""

    schema: OptimizerSchema
    variant: str
    steps: Steps
    group: Group
    rule: Rule
    updates: int
    dtype: DType = DTYPES["float32"]

    @property
    def path(self) -> str:
        """The parameter."""
        return self.group.paths[0]

    def begun(self) -> tuple[Arrays, Mapping[str, Arrays], Arrays]:
        """Returns the parameter, its slots and the group's own, as before a first update."""
        xp = NumpyBackend()
        configs = settled_group(self.steps, self.group, {self.path: self.rule}, self.variant)
        param = np.ones((SIDE,) * len(self.rule.axes), self.dtype)
        slots = self.steps.init(xp, param, configs[self.path], self.variant)
        shared = self.steps.begin(xp, {self.path: param}, self.group, self.variant)
        return {self.path: param}, {self.path: slots}, shared

    def moved(self, slots: Mapping[str, Any], updates: int | None = None) -> tuple[Any, Mapping[str, Any]]:
        """Returns the parameter and its slots after an update by a gradient of ones.

        Args:
            slots: Values of slots, in place of those that the rule begins with.
            updates: Updates done before; the run's if None.
        """
        xp = NumpyBackend()
        params, begun, shared = self.begun()
        values = {**begun[self.path], **slots}
        configs = settled_group(self.steps, self.group, {self.path: self.rule}, self.variant)
        scene = Scene(xp, self.variant, RATE, self.updates if updates is None else updates)
        grads = {self.path: np.ones_like(params[self.path])}
        with np.errstate(all="ignore"):
            after, slots_after, _ = move_group(
                self.steps, scene, self.group, configs, params, grads, {self.path: values}, shared
            )
        return after[self.path], slots_after[self.path]

    def second_moment(self) -> str | None:
        """Returns a slot that holds squares of gradients; None if the rule has none."""
        powers = {name: slot["gradient_power"]["power"] for name, slot in self.schema.data["slots"].items()}
        return next((name for name in self.begun()[1][self.path] if powers[name] == 2), None)

    def decay(self) -> float | None:
        """Returns which part of the second moment is left of the loaded one; None if the rule has none."""
        name = self.second_moment()
        if name is None:
            return None
        begun = self.begun()[1][self.path][name]
        some, none = (self.moved({name: np.full_like(begun, value)})[1][name] for value in (1, 0))
        return float(np.mean(some - none))

    def first_update(self, reset: Collection[str]) -> float:
        """Returns how many times a settled run's update the first one is after slots began anew.

        In a settled run every gradient was the same.

        Raises:
            ArithmeticError: Such a run doesn't move.
        """
        begun = self.begun()[1][self.path]
        slot_specs = self.schema.data["slots"]
        # What holds gradients of 1, or is made of a parameter of 1, is 1 from then on; momentum comes to rest.
        at_one = {
            n
            for n in begun
            if slot_specs[n]["gradient_power"]["power"] or isinstance(slot_specs[n]["init"], str)
        }
        settled = {name: np.ones_like(slot) if name in at_one else slot for name, slot in begun.items()}
        at_rest = max(self.updates, SETTLED)
        for _ in range(SETTLED):
            after = self.moved(settled, at_rest)[1]
            settled = {name: slot if name in at_one else after[name] for name, slot in settled.items()}
        usual = self._size(settled, at_rest)
        if not usual:
            raise ArithmeticError("its update vanishes in the dtype of its parameters")
        return self._size({n: begun[n] if n in reset else slot for n, slot in settled.items()}) / usual

    def _size(self, slots: Mapping[str, Any], updates: int | None = None) -> float:
        param, _ = self.moved(slots, updates)
        return float(np.max(np.abs(param - 1)))


def measured(
    state: State,
    schedules: Sequence[Schedule] = (),
    changes: Changes | None = None,
    rule_change: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Returns what the next update of each group will use, measured as far as the state says enough.

    Args:
        state: The state without its tensors.
        schedules: What is known of the run's schedules.
        changes: What was asked to be changed.
        rule_change: How the run goes on under another rule, as a plan has it.

    Returns:
        The rows of `next_update`, and for each: `decay`, what is left of the loaded second moment; `counted`, which
        update it is as the decay or the corrections of moments count; `discarded`, whether the loaded second moment
        has no part in it; `begun_anew`, whether that was reset; `unknown`, why these aren't known; `notes`, what else
        follows, in sentences.
    """
    rows = next_update(state, schedules)
    for row, group in zip(rows, state["groups"], strict=True):
        whose = group if "schema" in group else state
        hyperparameters = group["hyperparameters"]
        row["decay"] = row["discarded"] = row["unknown"] = None
        row["begun_anew"] = False
        done = row["update"]
        row["counted"] = None if done is None else done + 1 - (hyperparameters.get("step_offset") or 0)
        row["notes"] = [*_offset_said(whose, hyperparameters, rule_change)]
        if not group["paths"]:
            row["unknown"] = "moves nothing"
            continue
        try:
            trials = _trials(state, whose, group)
            decays = {trial.decay() for trial in trials}
            notes = _first_said(trials, changes)
        except (StatekitError, ArithmeticError) as error:
            row["unknown"] = _reason(error)
            continue
        if len(decays) > 1:
            row["unknown"] = (
                f"depends on {', '.join(_unsaid(trials[0].schema, trials[0].variant, hyperparameters))}"
            )
        else:
            (row["decay"],) = decays
            row["discarded"] = None if row["decay"] is None else row["decay"] == 0
        row["notes"] += notes
        moment = trials[0].second_moment()
        row["begun_anew"] = bool(changes and moment and _way(changes.slot_policy, moment) == "reset")
    return rows


def check_dtypes(state: TrainState, changes: Changes) -> None:
    """Refuses dtypes of slots that the rule which goes on with them doesn't keep: loading would cast them again.

    Raises:
        UsageError: Lists every slot.
    """
    record, kept = to_json(state.to_json()), dict[str, str]()
    for group in record["groups"]:
        whose = group if "schema" in group else record
        forms = {(*state.slots.get(path, ()), state.params[path].dtype): path for path in group["paths"]}
        for path in forms.values():
            try:
                (trial, *_) = _trials(record, whose, {**group, "paths": [path]})
            except StatekitError:  # nobody knows the rule: then the files keep what they are given
                continue
            begun = replace(trial, dtype=state.params[path].dtype).begun()[1][path]
            for name, slot in state.slots.get(path, {}).items():
                asked = any(fnmatchcase(name, pattern) for pattern in changes.slot_dtype)
                if (
                    (asked or changes.param_dtype is not None)
                    and name in begun
                    and begun[name].dtype != slot.dtype
                ):
                    kept[name] = f"{trial.variant} keeps it in {begun[name].dtype}, not in {slot.dtype}"
    faults = Faults((why, name) for name, why in kept.items())
    faults.check(
        UsageError,
        "The rule doesn't keep slots in that dtype beside these parameters",
        place=option("slot_dtype" if changes.slot_dtype else "param_dtype"),
        remedy="name those that it keeps so: --slot-dtype SLOT=DTYPE; or another layout",
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, StateError):
        return f"statekit has no step of it: {error.found or error.subject}"
    return str(getattr(error, "subject", error))


def _trials(state: State, whose: Mapping[str, Any], group: Mapping[str, Any]) -> list[Trial]:
    """Returns a rule to be tried; two where a hyperparameter isn't known, which they have with different values."""
    schema, variant = load_schema(whose["schema"]), str(whose["variant"])
    steps = steps_for(whose["schema"], whose["variant"])
    rules = {path: state["rules"][path] for path in group["paths"] if path in state["rules"]}
    factored = [path for path, rule in rules.items() if Rule.from_json(rule).factored]
    path = next(iter([*factored, *rules]), group["paths"][0])
    record = rules.get(path)
    rule = Rule((Axis.NONE, Axis.NONE), "given") if record is None else Rule.from_json(record)
    group_of_one = Group((path,), dict(group["hyperparameters"]))
    updates = int(state["counts"]["updates"])
    if variant and counts_apart(whose["schema"], variant):
        updates = int(state["counts"].get("behind", {}).get(path, updates))
    unsaid = _unsaid(schema, variant, group_of_one.hyperparameters)
    filled = [
        replace(
            group_of_one,
            hyperparameters={
                **{name: _trial(schema, name, n) for name in unsaid},
                **group_of_one.hyperparameters,
            },
        )
        for n in (range(len(TRIALS)) if unsaid else range(1))
    ]
    return [
        Trial(schema, variant, steps, trial_state, replace(rule, known_from="given"), updates)
        for trial_state in filled
    ]


def _unsaid(schema: OptimizerSchema, variant: str, hyperparameters: Mapping[str, Any]) -> list[str]:
    return [
        n for n in schema.variant(variant)["defaults"] if n not in hyperparameters and n not in RATE_NAMES
    ]


def _trial(schema: OptimizerSchema, name: str, number: int) -> Any:
    """Returns one of two values for a hyperparameter that is not given: of a number another each time."""
    spec = schema.hyperparameters[name]
    return TRIALS[number] if spec["type"][0] == "number" else spec["default"]


def _offset_said(
    whose: Mapping[str, Any], hyperparameters: Mapping[str, Any], rule_change: Mapping[str, Any] | None
) -> list[str]:
    """Returns how a decay that begins later is said where the run goes on, and whether that is exact."""
    schema, variant = load_schema(whose["schema"]), whose["variant"]
    if variant is None or "step_offset" not in schema.hyperparameters:
        return []
    made_up = rule_change["made_up"] if rule_change else ()
    if any("step_offset" in option for option in made_up):
        return [f"{variant} has no step_offset: its count of updates begins there instead, exactly"]
    if "step_offset" not in schema.variant(variant)["defaults"] or not hyperparameters.get("step_offset"):
        return []
    return [
        f"{variant} says it as {schema.spelling(variant, 'step_offset')}={hyperparameters['step_offset']}, exactly"
    ]


def _first_said(trials: Sequence[Trial], changes: Changes | None) -> list[str]:
    """Returns what slots that begin anew make of the first update, measured."""
    policy = changes.slot_policy if changes is not None else {}
    trial = trials[0]
    slots = trial.begun()[1][trial.path]
    reset = [name for name in slots if _way(policy, name) == "reset"]
    if not reset or policy.get(COUNT) == "reset":
        return []
    times = [trial_run.first_update(reset) for trial_run in trials]
    notes = []
    if max(abs(factor - 1) for factor in times) > OFF_BY:
        notes.append(
            f"with {', '.join(reset)} begun anew the first update is {_times(times)} a settled run's"
        )
    notes += _limited_note(trials, reset, max(times))
    if notes:
        counts = (
            "step_offset" in trial.schema.hyperparameters and "step_offset" in trial.group.hyperparameters
        )
        notes.append(f"{'--step-offset reset' if counts else '--slot-policy reset:count'} counts anew")
    return notes


def _limited_note(trials: Sequence[Trial], reset: Sequence[str], largest: float) -> list[str]:
    """Returns the first update's size before a threshold limits it, if that differs from `largest`."""
    limited = [trial for trial in trials if trial.group.hyperparameters.get("clipping_threshold") is not None]
    unlimited = [_unlimited(trial).first_update(reset) for trial in limited]
    if not unlimited or abs(max(unlimited) - largest) <= OFF_BY * largest:
        return []
    return [
        f"with {', '.join(reset)} begun anew the first update is {_times(unlimited)} a settled run's before "
        f"clipping_threshold limits it: the decay counts {trials[0].updates} updates, which it hasn't seen"
    ]


def _unlimited(trial: Trial) -> Trial:
    """Returns a trial whose update nothing limits."""
    hyper = {**trial.group.hyperparameters, "clipping_threshold": None}
    return replace(trial, group=replace(trial.group, hyperparameters=hyper))


def _way(policy: Mapping[str, str], name: str) -> str:
    ways = [way for pattern, way in policy.items() if fnmatchcase(name, pattern)]
    return ways[-1] if ways else "keep"


def _times(values: Sequence[float]) -> str:
    least, most = min(values), max(values)
    if least >= (1 - OFF_BY) * most:
        return f"{least:.3g} times"
    return f"{least:.3g} to {most:.3g} times (an unknown fact decides)"
