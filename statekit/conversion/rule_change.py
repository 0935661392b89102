"""Whether the rule of another implementation goes on with a run, and with which hyperparameters.

Slots may fit into another system's files to the last bit while that system makes another update of them: epsilon stands
elsewhere, the learning rate is capped, a decay can't be set back. schemas/*.json says in what implementations differ,
what each difference changes, and when it doesn't matter; here two of them are held against one state.

Source: the variants' own in `schemas`; the classes of differences, modern.md's experiments on pairs of originals.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from statekit.conversion.contracts import Exactness
from statekit.errors import Faults, InexactError, UsageError, some
from statekit.state.constants import variant_constants
from statekit.state.factoring import by_shape, swapped, turned_matrices
from statekit.state.hyperparameters import IS_EXCLUDED, Alike, alike, among, last_name
from statekit.state.options import RATE_NAMES
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.state.stored_params import entered
from statekit.state.train_state import Axis, Group, Rule, TrainState
from statekit.tensors.tensor import DTYPES, Tensor, scalar
from statekit.tensors.tree import plain
from statekit.tensors.views import Mean, Scaled

EFFECTS: Mapping[str, Exactness] = {
    "none": Exactness.BITWISE,
    "rounding": Exactness.ROUNDING,
    "exceptions": Exactness.ROUNDING,
    "update": Exactness.STATISTICS,
    "slots": Exactness.ESTIMATE,
}
"""How exactly a run goes on under another rule, by what the difference changes."""
_AT_WORST: Mapping[Alike | None, Exactness] = {"as float32": Exactness.ROUNDING}
"""How exactly a run goes on at the worst with a number that is the run's as some systems keep it."""
_DECAY, _EXCLUDED = "weight_decay_rate", "exclude_from_weight_decay"
_EXPONENT = "weight_decay_rate_lr_exponent"
_OFFSET, _OFF_COUNT = "step_offset", "step_offset is taken off the count"
UNKNOWN = "unknown"
"""Stands for the value of a hyperparameter that is on, and that nobody knows."""
_ORIENTATION = "orientation"
_STORED, _BUFFER = "moments_stored", "momentum_buffer"
_BY_NAME = ("name_regex", "last_name_regex", "mask")


@dataclass(frozen=True)
class Difference:
    """One respect in which the target's rule isn't the source's.

    Attributes:
        what: Key of the schema's differences or hyperparameters, or what the target does with slots.
        source: The source's form or value.
        target: The target's.
        exactness: How exactly the run goes on in spite of it.
        measured: How large it was in runs of the originals, where its rounding is coarse.
    """

    what: str
    source: Any
    target: Any
    exactness: Exactness
    measured: str = ""

    def __str__(self) -> str:
        sentence = f"{self.what} is {self.source} in the source, {self.target} in the target"
        return f"{sentence} ({self.measured})" if self.measured else sentence

    def to_json(self) -> dict[str, Any]:
        """Returns the difference as it stands in a plan."""
        values = {"source": plain(self.source), "target": plain(self.target)}
        measured = {"measured": self.measured} if self.measured else {}
        return {"what": self.what, **values, "exactness": self.exactness.name.lower(), **measured}


Fate: TypeAlias = Literal["equal", "idle", "compensated", "rounding", "semantic"]
"""What becomes of a respect in which rules may part. `idle`: it changes nothing here; `semantic`: another update."""


@dataclass(frozen=True)
class Compared:
    """One respect in which two rules may part, and what becomes of it.

    Attributes:
        what: Key of the schema's differences or hyperparameters.
        source: The source's form or value.
        target: The target's.
        fate: What becomes of it.
        why: In a sentence; empty where they are equal.
    """

    what: str
    source: Any
    target: Any
    fate: Fate
    why: str


@dataclass(frozen=True)
class RuleChange:
    """A state under another implementation's rule.

    Attributes:
        source: The variant that made the state.
        target: The variant that goes on with it.
        state: The state as the target's rule has it, with its hyperparameters.
        differences: What isn't the same, from the worst on.
        compensated_by: What hyperparameters make up for, a sentence each.
    """

    source: str
    target: str
    state: TrainState
    differences: tuple[Difference, ...] = ()
    compensated_by: tuple[str, ...] = ()

    @property
    def exactness(self) -> Exactness:
        """How exactly the run goes on."""
        return max([Exactness.BITWISE, *(difference.exactness for difference in self.differences)])

    def check(self, allowed: Exactness, nearest: Callable[[], Iterable[str]]) -> None:
        """Refuses to go on less exactly than was required.

        Args:
            allowed: The worst exactness allowed.
            nearest: Gives the layouts that go on well enough.

        Raises:
            InexactError: Lists every difference that is less exact.
        """
        worse = [difference for difference in self.differences if difference.exactness > allowed]
        if worse:
            raise Faults((str(difference), difference.exactness.name.lower()) for difference in worse).error(
                InexactError,
                "The target's rule would make other updates than the run's.",
                place=f"{' and '.join(self.state.optimizer.schemas)}, {self.source} to {self.target}",
                expected=f"{allowed.name.lower()} or better",
                remedy=f"choose another layout: {', '.join(nearest())}; or allow it with --require "
                f"{self.exactness.name.lower()}",
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the rule change as it stands in a plan."""
        return {
            "from": self.source,
            "to": self.target,
            "exactness": self.exactness.name.lower(),
            "differences": [difference.to_json() for difference in self.differences],
            "made_up": list(self.compensated_by),
        }


def best_rule_change(state: TrainState, makers: Collection[str], targets: Collection[str]) -> RuleChange:
    """Returns how a state goes on most exactly in a system that follows other rules.

    Args:
        state: The state.
        makers: Variants that may have made it; at least one.
        targets: Variants whose rule the target follows, the usual one first; at least one.
    """
    return min(
        (change_rule(state, a, b) for a in makers for b in targets), key=lambda change: change.exactness
    )


def joined_rule_change(state: TrainState, ways: Sequence[RuleChange | None]) -> RuleChange | None:
    """Returns how a run goes on from how each of its optimizers does, in the order of `TrainState.parts`."""
    if len(ways) == 1 or not any(ways):
        return ways[0]
    parts, changes = [], []
    for part, way in zip(state.parts(), ways, strict=True):
        parts.append(part if way is None else way.state)
        changes += [] if way is None else [(part.optimizer.schema, way)]
    return RuleChange(
        " and ".join(way.source for _, way in changes),
        " and ".join(way.target for _, way in changes),
        state.of_parts(parts),
        tuple(
            sorted(
                (
                    replace(difference, what=f"{schema}'s {difference.what}")
                    for schema, way in changes
                    for difference in way.differences
                ),
                key=lambda change: -change.exactness,
            )
        ),
        tuple(dict.fromkeys(sentence for _, way in changes for sentence in way.compensated_by)),
    )


def change_rule(state: TrainState, source: str, target: str) -> RuleChange:
    """Returns a state as another variant goes on with it.

    Raises:
        NotFoundError: The schema has no such variant.
        UsageError: The run's step_offset lies beyond its updates.
    """
    bridge = Bridge(load_schema(state.optimizer.schema), source, target, _has(state))
    groups, differences, compensated_by, shifts = [], {}, {}, set[int]()
    for group in state.optimizer.groups:
        side = bridge.over(group, state.switched_on(group))
        differences.update({difference.what: difference for difference in side.differences})
        compensated_by.update(dict.fromkeys(side.compensated_by))
        if group.paths:
            shifts.add(side.shift)
        values = {**side.values, **_dtypes(state, group, side.values, target)}
        groups += [replace(group, hyperparameters=values, known_from=side.known_from)]
    if variant_constants(bridge.schema.name, target).get("decay_exclusions") == "groups":
        groups = [
            part
            for group, old in zip(groups, state.optimizer.groups, strict=True)
            for part in bridge.split(group, old)
        ]
    shift, done = max(shifts, default=0), state.counts.updates
    if shift > done:
        raise UsageError(
            "The step offset lies beyond the step; the second moment would become NaN for good.",
            place="step_offset",
            expected=f"step_offset <= {done}",
            found=shift,
            remedy="say where the decay starts: --step-offset",
        )
    if len(shifts) > 1:  # the target has one count for all
        effect = EFFECTS[bridge.schema.hyperparameters[_OFFSET]["effect"]]
        several = " and ".join(map(str, sorted(shifts)))
        differences[_OFFSET] = Difference(_OFFSET, f"{several}, by groups,", f"{shift}", effect)
        compensated_by.pop(_OFF_COUNT, None)
    optimizer = replace(state.optimizer, variant=target, groups=tuple(groups))
    counts = replace(state.counts, updates=state.counts.updates - shift)
    notes = (*state.assumptions, *bridge.assumed(state))
    taken = replace(state, optimizer=optimizer, counts=counts, assumptions=notes)
    moved, refactored = _refactored(entered(taken, source), target)
    moved = _relabelled(moved, target)
    moved, recast = _recast(moved, source, target)
    differences.update(recast)
    moved, turned = _oriented(moved, source)
    differences.update(turned)
    worst_first = sorted([*differences.values(), *refactored], key=lambda worst: -worst.exactness)
    return RuleChange(source, target, moved, tuple(worst_first), tuple(compensated_by))


def _dtypes(state: TrainState, group: Group, values: Mapping[str, Any], target: str) -> dict[str, str]:
    """Returns the dtype of slots that the source keeps as the parameter is, where the target has to be told a dtype."""
    schema = load_schema(state.optimizer.schema)
    dtypes: dict[str, str] = {}
    for name, value in values.items():
        slots = schema.hyperparameters[name].get("decides", {}).get("dtype", ())
        if not slots or not isinstance(value, str) or value in DTYPES:
            continue
        stored = {
            slot.dtype.name
            for path in group.paths
            for slot_dtype, slot in state.slots.get(path, {}).items()
            if slot_dtype in slots
        }
        dtypes[name] = stored.pop() if len(stored) == 1 else schema.variant(target)["defaults"][name]
    return dtypes


def _has(state: TrainState) -> Mapping[str, bool]:
    """Returns what the keys `needs` of the schema ask of a state."""
    batch = any(Axis.BATCH in rule.axes for rule in state.rules.values())
    high = any(len(state.params[path].shape) > 2 for path in state.optimizer.paths)
    return {"batch_axes": batch, "rank_above_two": high, "behind": bool(state.counts.behind)}


@dataclass(frozen=True)
class _Side:
    """One group under the target's rule."""

    values: Mapping[str, Any]
    known_from: Mapping[str, Any]
    differences: tuple[Difference, ...]
    compensated_by: tuple[str, ...]
    shift: int


def _excluded(form: str, paths: Sequence[str], value: Any) -> set[str]:
    """Returns the parameters that a value excludes, read as one of the forms of `IS_EXCLUDED`."""
    return {path for path in paths if IS_EXCLUDED[form](path, value)}


def _pattern_of(
    spared: Collection[str], paths: Sequence[str], called: Callable[[str], str]
) -> tuple[str, bool]:
    """Returns a regular expression for the names of spared parameters that no other has, and whether that is all."""
    others = {called(path) for path in paths if path not in spared}
    names = sorted({called(path) for path in spared} - others)
    pattern = rf"\A(?:{'|'.join(map(re.escape, names))})\Z" if names else ""
    return pattern, all(called(path) in names for path in spared)


@dataclass(frozen=True)
class Bridge:
    """From one variant to another, for states that have certain things."""

    schema: OptimizerSchema
    source: str
    target: str
    has: Mapping[str, bool] = field(default_factory=dict)

    def over(self, group: Group, on: Iterable[str] = ()) -> _Side:
        """Returns one group under the target's rule.

        Args:
            group: The group.
            on: Hyperparameters that are on, as its slots show, though nobody said so: a number stays unknown.
        """
        settings = self._settings(group, on)
        bridges = self._bridges(settings)
        covered = {key for bridge in bridges for key in bridge["covers"]}
        carried = self._carried(settings)
        settable = self.schema.variant(self.target)["defaults"]
        bridged = {
            key: value for bridge in bridges for key, value in bridge["set"].items() if key in settable
        }
        values = self._by_update({**carried, **bridged}, settings)
        spared: tuple[Difference, ...] = ()
        if _EXCLUDED in values:
            values[_EXCLUDED], spared = self._spared(group, settings, values[_EXCLUDED])
        offered = self.schema.variant(self.source)["defaults"]
        evidence = {
            # What the source doesn't offer follows from its rule.
            name: group.known_from.get(name, "assumed" if name in offered else "inferred")
            for name in values
        }
        missed, shift = self._missed(settings, values, covered)
        return _Side(
            values,
            evidence,
            (*self._forms(settings, covered), *missed, *spared),
            (*(bridge["because"] for bridge in bridges), *((_OFF_COUNT,) if shift else ())),
            shift,
        )

    def _settings(self, group: Group, on: Iterable[str]) -> dict[str, Any]:
        """Returns the source's hyperparameters, as far as they are known or usual."""
        usual = {**self.schema.settings(self.source), **dict.fromkeys(RATE_NAMES)}
        shown = {name: True if self._is_boolean(name) else UNKNOWN for name in on}
        values = {
            name: value if name in RATE_NAMES else scalar(value)
            for name, value in group.hyperparameters.items()
        }
        return {**usual, **values, **shown}

    def _bridges(self, settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns what hyperparameters make up for, of such a run."""
        return [bridge for bridge in self.schema.data.get("bridges", ()) if self._fits(bridge, settings)]

    def compared(self, group: Group, on: Iterable[str] = ()) -> Iterator[Compared]:
        """Yields every point in which two rules may differ, equal ones too, with its effect.

        Args:
            group: The group.
            on: As in `over`.
        """
        side, settings = self.over(group, on), self._settings(group, on)
        bridges = self._bridges(settings)
        because = {key: bridge["because"] for bridge in bridges for key in bridge["covers"]}
        worse = {difference.what: difference for difference in side.differences}
        sources, targets = (
            variant_constants(self.schema.name, variant) for variant in (self.source, self.target)
        )
        for key, spec in self.schema.data["differences"].items():
            fate, why = self._fate(key, spec, (sources[key], targets[key]), worse, because, settings)
            yield Compared(key, sources[key], targets[key], fate, why)
        target_values = {**self.schema.settings(self.target), **side.values}
        for name, spec in self.schema.hyperparameters.items():
            if name in RATE_NAMES and name not in because:
                continue
            values = settings.get(name), target_values.get(name)
            fate, why = self._fate(name, spec, values, worse, because, settings)
            if side.shift and "instead" in spec:
                fate, why = "compensated", "it is taken off the count of updates"
            elif fate == "idle" and self._split_later(name):
                fate, why = "compensated", "groups of their own have no decay"
            yield Compared(name, *values, fate, why)

    def _fate(
        self,
        aspect: str,
        spec: Mapping[str, Any],
        values: tuple[Any, Any],
        worse: Mapping[str, Difference],
        because: Mapping[str, str],
        settings: Mapping[str, Any],
    ) -> tuple[Fate, str]:
        """Returns what becomes of one respect, and why."""
        meaning = str(spec["meaning"])
        if aspect in worse:
            return ("rounding" if worse[aspect].exactness <= Exactness.ROUNDING else "semantic"), meaning
        how = alike(spec, *values)
        if how == "equal":
            return "equal", ""
        if aspect in because:
            return "compensated", because[aspect]
        if EFFECTS[spec["effect"]] <= Exactness.BITWISE:
            return "idle", f"it changes no update: {meaning}"
        if any(all(among(value, some) for value in values) for some in spec.get("alike", ())):
            return "idle", f"both do the same: {meaning}"
        if how == "off":
            return "idle", "both mean that it is off"
        if not self._matters(spec, settings):
            return "idle", f"it plays no part in this run: {meaning}"
        return "idle", f"the target takes the source's: {meaning}"

    def _is_boolean(self, name: str) -> bool:
        return "boolean" in self.schema.hyperparameters[name]["type"]

    def assumed(self, state: TrainState) -> list[str]:
        """Returns what is taken for granted of the source's hyperparameters, if anything."""
        offered = [name for name in self.schema.variant(self.source)["defaults"] if name not in RATE_NAMES]
        unknown = {
            name
            for group in state.optimizer.groups
            for name in offered
            if name not in group.hyperparameters and name not in state.switched_on(group)
        }
        names = ", ".join(name for name in offered if name in unknown)
        return [f"Taken for a run of {self.source} with its defaults of {names}."] if unknown else []

    def _fits(self, bridge: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
        if any(among(settings[name], values) for name, values in bridge.get("unless", {}).items()):
            return False
        origin = {**settings, **variant_constants(self.schema.name, self.source)}
        targets = variant_constants(self.schema.name, self.target)
        return _meets(origin, bridge["from"]) and _meets(targets, bridge["to"])

    def _carried(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the target's hyperparameters as the source behaves, or would with its defaults; never a rate."""
        offered = {**dict.fromkeys(self._by_loop(settings)), **self.schema.variant(self.target)["defaults"]}
        return {
            name: self._spelt(name, settings[name], usual)
            for name, usual in offered.items()
            if settings[name] is not UNKNOWN and (name not in RATE_NAMES or settings[name] is not None)
        }

    def _by_update(self, values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the target's hyperparameters with a decay of this update's size.

        One rule multiplies it by the learning rate, and another doesn't. Where nobody knows the rate, nobody knows
        the decay.
        """
        of_rate = self.schema.data["differences"].get("weight_decay_form", {}).get("of_rate", ())
        powers = [
            1.0 if form.get("weight_decay_form") in of_rate else float(hyperparameters.get(_EXPONENT) or 0.0)
            for form, hyperparameters in (
                (variant_constants(self.schema.name, self.source), settings),
                (variant_constants(self.schema.name, self.target), values),
            )
        ]
        if powers[0] == powers[1] or not values.get(_DECAY):
            return values
        rate = settings.get(RATE_NAMES[0])
        if not isinstance(rate, (int, float)) or not rate:
            return {name: value for name, value in values.items() if name != _DECAY}
        return {**values, _DECAY: values[_DECAY] * rate ** (powers[0] - powers[1])}

    def _by_loop(self, settings: Mapping[str, Any]) -> list[str]:
        """Returns the hyperparameters that are on, and that the loops of source and target do themselves."""
        ends = {self.source, self.target}
        return [
            name
            for name, spec in self.schema.hyperparameters.items()
            if ends <= {*spec.get("by_loop", ())} and settings[name] is not None
        ]

    def _spelt(self, name: str, value: Any, usual: Any) -> Any:
        """Returns the target's spelling of a value that means off."""
        off = self.schema.hyperparameters[name].get("off", ())
        if not among(value, off):
            return value
        same_kind = [spelling for spelling in off if (spelling is None) == (usual is None)]
        return value if not same_kind else None if usual is None else type(usual)(same_kind[0])

    def _forms(self, settings: Mapping[str, Any], covered: set[str]) -> Iterator[Difference]:
        before, after = (variant_constants(self.schema.name, side) for side in (self.source, self.target))
        for key, spec in self.schema.data["differences"].items():
            alike = any({before[key], after[key]} <= set(some) for some in spec.get("alike", ()))
            if (
                before[key] != after[key]
                and not alike
                and key not in covered
                and self._matters(spec, settings)
            ):
                exactness = EFFECTS[spec["effect"]]
                yield Difference(key, before[key], after[key], exactness, spec.get("measured", ""))

    def _missed(
        self, settings: Mapping[str, Any], values: Mapping[str, Any], covered: set[str]
    ) -> tuple[list[Difference], int]:
        """Returns what hyperparameters of the source the target can't have, and what is taken off the count instead."""
        target_values = {**self.schema.settings(self.target), **values}
        offered = {*self.schema.variant(self.target)["defaults"], *self._by_loop(settings)}
        differences, shift = [], 0
        for name, spec in self.schema.hyperparameters.items():
            value, other = settings[name], target_values[name]
            how = alike(spec, value, other)
            if (
                how in ("equal", "off")
                or name in covered
                or name in offered
                or not self._matters(spec, settings)
            ):
                continue
            goal = {**target_values, **variant_constants(self.schema.name, self.target)}
            if "instead" in spec and _meets(goal, spec["instead"]["to"]):
                shift = int(value)
            elif not self._split_later(name):
                effect = EFFECTS[spec["effect"]]
                differences.append(Difference(name, value, other, min(effect, _AT_WORST.get(how, effect))))
        return differences, shift

    def _matters(self, spec: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
        idle = any(among(settings[name], values) for name, values in spec.get("unless", {}).items())
        return (
            EFFECTS[spec["effect"]] > Exactness.BITWISE
            and not idle
            and self.has.get(spec.get("needs", ""), True)
        )

    def _spared(
        self, group: Group, settings: Mapping[str, Any], value: Any
    ) -> tuple[Any, tuple[Difference, ...]]:
        """Returns the target's form of the parameters without decay, and the differences that it can't express."""
        source_form, target_form = self._exclusions()
        if source_form == target_form or not {source_form, target_form} <= {*_BY_NAME} or not value:
            return value, ()
        spared = _excluded(source_form, group.paths, value)
        if target_form == "mask":
            return {path: path in spared for path in group.paths}, ()
        if not isinstance(value, Mapping) and _excluded(target_form, group.paths, value) == spared:
            return value, ()
        pattern, is_exact = _pattern_of(
            spared, group.paths, last_name if target_form == "last_name_regex" else str
        )
        none = self._spelt(_EXCLUDED, None, self.schema.variant(self.target)["defaults"][_EXCLUDED])
        names = [pattern] if pattern else none
        spec = self.schema.hyperparameters[_EXCLUDED]
        if is_exact or not self._matters(spec, settings):
            return names, ()
        return names, (Difference(_EXCLUDED, value, names, EFFECTS[spec["effect"]]),)

    def _exclusions(self) -> tuple[str, str]:
        """Returns in which form source and target keep parameters from weight decay."""
        forms = (
            variant_constants(self.schema.name, side)["decay_exclusions"]
            for side in (self.source, self.target)
        )
        source_form, target_form = forms
        return source_form, target_form

    def _split_later(self, name: str) -> bool:
        """Tells whether a hyperparameter becomes groups of their own."""
        if name != _EXCLUDED:
            return False
        source_form, target_form = self._exclusions()
        return source_form in _BY_NAME and target_form == "groups"

    def split(self, group: Group, old: Group) -> list[Group]:
        """Returns a group as two where the source keeps some of its parameters from weight decay by their names."""
        excluded, (here, _) = self._settings(old, ())[_EXCLUDED], self._exclusions()
        if here not in _BY_NAME or not excluded or not group.hyperparameters.get(_DECAY):
            return [group]
        by = IS_EXCLUDED[here]
        without = [path for path in group.paths if by(path, excluded)]
        rest = tuple(path for path in group.paths if path not in without)
        none = {**group.hyperparameters, _DECAY: 0.0}
        both = [
            replace(group, paths=rest),
            replace(group, paths=tuple(without), hyperparameters=none, slots={}),
        ]
        return [part for part in both if part.paths]


def _meets(actual: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(among(actual.get(key), values) for key, values in wanted.items())


def _refactored(state: TrainState, target: str) -> tuple[TrainState, list[Difference]]:
    """Returns a state with a full second moment averaged where the target would have factored it from the start."""
    form = variant_constants(state.optimizer.schema, target)
    if (
        "factored_rank" not in form
        or form["factored_rank"] == "two_or_rule"
        or form["factored_minimum"] != "none"
    ):
        return state, []
    slots, rules, done = {**state.slots}, {**state.rules}, []
    usual = load_schema(state.optimizer.schema).settings(target)["factored"]
    sentences = {
        path: group.hyperparameters.get("factored", usual)
        for group in state.optimizer.groups
        for path in group.paths
    }
    for path, tensors in state.slots.items():
        factored = sentences.get(path, usual)
        axes = by_shape(form, state.params[path].shape, factored)
        rule = Rule(axes, "assumed")
        if not rule.factored or "v" not in tensors or "v_row" in tensors:
            continue
        column, row = rule.dims(Axis.COLUMN)[0], rule.dims(Axis.ROW)[0]
        averages: dict[str, Tensor] = {"v_row": Mean(tensors["v"], column), "v_col": Mean(tensors["v"], row)}
        slots[path] = {**averages, **{name: slot for name, slot in tensors.items() if name != "v"}}
        rules[path] = rule
        done.append(path)
    subject = f"v of {len(done)} parameters ({', '.join(done[:3])}{', ...' if len(done) > 3 else ''})"
    lost = (
        [Difference(subject, "full", "averaged into v_row and v_col", Exactness.STATISTICS)] if done else []
    )
    return replace(state, slots=slots, rules=rules), lost


@dataclass(frozen=True)
class Recast:
    """Slots that one variant keeps as another's times a number.

    Attributes:
        what: The difference that it makes up for.
        source: The source's form.
        target: The target's.
        decays: The slots, each with the hyperparameter that the number comes from.
        factor: The number, from that hyperparameter and the count of updates.
        how: What is done, in words.
    """

    what: str
    source: str
    target: str
    decays: Mapping[str, str]
    factor: Callable[[float, int], float]
    how: str


_ADAM_DECAYS, _MOMENTUM = {"m": "beta1", "v": "beta2"}, {"m": "momentum"}
RECASTS = (
    Recast(
        _STORED, "corrected", "averages", _ADAM_DECAYS, lambda b, t: 1.0 - b**t, "multiplied by 1 - beta^t"
    ),
    Recast(_BUFFER, "sum", "mean", _MOMENTUM, lambda b, t: 1.0 - b, "multiplied by 1 - momentum"),
    Recast(_BUFFER, "mean", "sum", _MOMENTUM, lambda b, t: 1.0 / (1.0 - b), "divided by 1 - momentum"),
)
"""A momentum that has changed during the run makes a sum that is no mean's multiple; no file says whether it did."""


def _recast(state: TrainState, source: str, target: str) -> tuple[TrainState, dict[str, Difference]]:
    """Rescales slots that the target's rule keeps as another multiple.

    Only where every group's decays are known; else the difference stays as it is.
    """
    sources, targets = (variant_constants(state.optimizer.schema, side) for side in (source, target))
    settings = [group.hyperparameters for group in state.optimizer.groups]
    slots, done = {path: dict(tensors) for path, tensors in state.slots.items()}, {}
    for recast in RECASTS:
        fits_forms = (sources.get(recast.what), targets.get(recast.what)) == (recast.source, recast.target)
        if not fits_forms or not all(
            isinstance(values.get(name), float) for values in settings for name in recast.decays.values()
        ):
            continue
        for path, values in (
            (path, group.hyperparameters) for group in state.optimizer.groups for path in group.paths
        ):
            for slot, name in recast.decays.items():
                if slot in slots.get(path, {}):
                    factor = recast.factor(values[name], state.counts.updates)
                    slots[path][slot] = Scaled(slots[path][slot], factor)
        done[recast.what] = Difference(recast.what, recast.source, recast.how, Exactness.ROUNDING)
    return replace(state, slots=slots) if done else state, done


def _oriented(state: TrainState, source: str) -> tuple[TrainState, dict[str, Difference]]:
    """Returns a state, and the matrices whose outputs the target looks for on the other axis.

    A map that transposes them makes them the target's own.
    """
    if not (turned := turned_matrices(state, source)):
        return state, {}
    schema, target = state.optimizer.schema, str(state.optimizer.variant)
    before, after = (variant_constants(schema, variant)[_ORIENTATION] for variant in (source, target))
    subject = f"{_ORIENTATION} of {some(turned)}"
    unsaid = replace(state, rules={path: rule for path, rule in state.rules.items() if path not in turned})
    return unsaid, {subject: Difference(subject, before, after, Exactness.STATISTICS)}


def _relabelled(state: TrainState, target: str) -> TrainState:
    """Returns a state whose labels are the target's, where both average the same two axes and call them otherwise.

    What a square matrix is written as, and read again, would else depend on whose labels the reader takes.
    """
    form = variant_constants(state.optimizer.schema, target)
    slots, rules = {**state.slots}, {**state.rules}
    for path, rule in state.rules.items():
        if not rule.factored or "tie_break" not in form:
            continue
        axes = swapped(rule.axes)
        if axes == by_shape(form, state.params[path].shape, True):
            names = {"v_row": "v_col", "v_col": "v_row"}
            slots[path] = {names.get(name, name): slot for name, slot in state.slots.get(path, {}).items()}
            rules[path] = replace(rule, axes=axes)
    return replace(state, slots=slots, rules=rules)
