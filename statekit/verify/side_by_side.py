"""The replay of a verification: both sides through every probe, each tensor's worst, and the controls beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from statekit.arrays.backend import Backend
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.budget import Budget
from statekit.errors import StatekitError
from statekit.optim.run import store
from statekit.state.constants import variant_constants
from statekit.state.exactness import Exactness
from statekit.state.factoring import swapped
from statekit.state.stored_params import encoded_paths
from statekit.state.train_state import TrainState
from statekit.tensors.distance import gap, ulp
from statekit.tensors.tensor import Array, float_info
from statekit.verify.controls import Control, controls_of
from statekit.verify.identity import Verdict
from statekit.verify.natives import Rates, class_of
from statekit.verify.probes import NOT_A_NUMBER, Kind, Probe, Sample, drawn, gradients_of, sampled
from statekit.verify.stepping import (
    EDGES,
    Arrays,
    Bounds,
    Key,
    Rules,
    Side,
    arrays,
    at_rates,
    bounds,
    rates_of,
    rules,
    run,
)

KINDS: Mapping[str, tuple[Kind, ...]] = {
    "all": ("random", "adversarial"), "random": ("random",), "adversarial": ("adversarial",)
}  # fmt: skip
"""What `--gradients` names; all else is a file."""
_SINGLE = 256.0
"""Roundings in units of float32, up to which nothing is stored in low precision: bfloat16 has 2^16 in one."""


_OF_THE_MACHINE = (MemoryError, OSError)
"""What says nothing of a checkpoint, whoever raises it: a disk that is full, memory that is short."""


_SHORT = ("OutOfMemoryError", "ResourceExhaustedError")
"""Classes that PyTorch and TensorFlow raise where a device has no more memory; JAX says RESOURCE_EXHAUSTED."""


def refuse_short_memory(error: Exception) -> None:
    """Raises a framework's error as MemoryError, if the device lacks memory: it is no fault of a checkpoint.

    Raises:
        MemoryError: The device has no more.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {*_SHORT} or "RESOURCE_EXHAUSTED" in str(error):
        raise MemoryError(f"The device has not enough memory: {str(error)[:500]}") from error


@dataclass(frozen=True)
class Worst:
    """One tensor over all probes.

    Attributes:
        unequal: Elements in which the sides differ, of all probes.
        ulps: Their largest difference.
        relative: Over the largest movement.
        ratio: Over the width of the bound.
        faults: What was wrong, a sentence each.
        parted: By how much of a movement the two rules part; 0 where they don't.
    """

    unequal: int = 0
    ulps: float = 0.0
    relative: float = 0.0
    ratio: float = 0.0
    faults: tuple[str, ...] = ()
    parted: float = 0.0

    def with_(self, other: Worst) -> Worst:
        """Returns the worse of both in everything."""
        return Worst(
            self.unequal + other.unequal,
            max(self.ulps, other.ulps),
            max(self.relative, other.relative),
            max(self.ratio, other.ratio),
            (*self.faults, *other.faults),
            max(self.parted, other.parted),
        )


_LIMIT = "global_norm_clip_threshold"


def _clipped_by_the_program(states: tuple[TrainState, TrainState, TrainState]) -> float | None:
    """Returns the norm by which a program clips before an optimizer that clips nothing itself, as Trainer does.

    Both sides are then stepped by gradients as the optimizer gets them. None where the states don't agree on the norm:
    what the target leaves out is a difference of the run.
    """
    limits = {group.hyperparameters.get(_LIMIT) for state in states for group in state.optimizer.groups}
    kinds = [kind for state in states for kind in state.optimizer.kinds]
    by_program = any(
        variant is not None and variant_constants(schema, variant).get("gradient_clipping") == "none"
        for schema, variant in kinds
    )
    return limits.pop() if by_program and len(limits) == 1 else None


_CALLS = "gradient_accumulation_steps"


def _accumulated(states: tuple[TrainState, TrainState, TrainState]) -> int | None:
    """Returns how many gradients an optimizer accumulates for an update; None where it does not, or states differ."""
    calls = {group.hyperparameters.get(_CALLS) for state in states for group in state.optimizer.groups}
    return calls.pop() if len(calls) == 1 else None


@dataclass
class _Ran:
    """What a probe showed of all tensors."""

    tensors: dict[Key, Worst] = field(default_factory=dict)
    histogram: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    outside: dict[str, int] = field(default_factory=lambda: {"source": 0, "target": 0, "rule": 0})
    undecided: int = 0


class SideBySide:
    """A source and a target that are stepped.

    Args:
        carried: The source's state under the target's names, by the source's rule.
        expected: The same as the target's rule should have it.
        actual: What the target holds.
        layouts: Of both.
        allowed: How far the rules are known to part: beyond rounding no agreement is expected.
    """

    def __init__(
        self,
        carried: TrainState,
        expected: TrainState,
        actual: TrainState,
        layouts: tuple[str, str],
        allowed: Exactness,
    ) -> None:
        states = (carried, expected, actual)
        self._layouts, self._allowed = layouts, allowed
        self._notes: list[str] = []
        if (limit := _clipped_by_the_program(states)) is not None:
            self._notes.append(
                f"the source's program clips gradients by their norm, {limit!r}, before its optimizer"
            )
            carried, expected, actual = (state.with_hyperparameters(**{_LIMIT: None}) for state in states)
        if (calls := _accumulated(states)) is not None:
            self._notes.append(f"a gradient here is the mean of the {calls} that an update accumulates")
            carried, expected, actual = (
                s.with_hyperparameters(**{_CALLS: None}) for s in (carried, expected, actual)
            )
        self._states = carried, expected, actual

    def run(
        self,
        gradients: str,
        updates: int,
        xp: Backend,
        seed: int,
        everything: bool,
        tell: Callable[[str], object],
        budget: Budget | None = None,
    ) -> tuple[dict[str, Any], dict[str, tuple[Verdict, str]], list[dict[str, Any]]]:
        """Steps both sides; a file of gradients is read on the job's budget.

        Returns:
            The replay as a certificate has it; the verdict and the reason of each tensor, by canonical name; and what
            became of each control.

        Raises:
            UnknownRuleError: A step needs what nobody said.
        """
        sample = sampled(self._states[1], seed, everything)
        before, right, expected = (sample.of(state) for state in self._states)
        rates, rate_notes = rates_of(right)
        before, of_source = at_rates(before, rates)
        self._notes += [*rate_notes, *of_source]
        sides = self._as_in_their_files(
            self._side(before, self._layouts[0], rates, is_source=True),
            self._side(expected, self._layouts[1], rates),
        )
        if encoded_paths(right) != encoded_paths(before):
            self._notes.append("parameters that one side stores encoded are held to the target's bound alone")
        twin = self._twin(sample)
        pending = {control.name: control for control in controls_of(right)}
        wrong = {name: control.make(right, twin) for name, control in pending.items()}
        seen: dict[str, dict[str, Any]] = {}
        worst = {key: Worst(faults=(why,)) for key, why in sides[1].changed.items()}
        rows = []
        states = self._states[1], right
        with _probes(gradients, states, sample, updates, seed, budget) as (probes, of_file):
            for probe in probes:
                tell(probe.name)
                ran, bound = self._probe(probe, xp, sides, before, right, rates)
                for key, tensor in ran.tensors.items():
                    worst[key] = worst.get(key, Worst()).with_(tensor)
                rows.append(_row(probe, ran))
                unseen = {name: state for name, state in wrong.items() if name not in seen}
                seen |= _newly_seen(unseen, bound, probe, rates, tell)
        data = {
            "stepped": True,
            "updates": updates,
            "gradients": gradients,
            **of_file,
            "sample": sample.to_json(),
            "rates": list(rates),
            "source": sides[0].title,
            "target": sides[1].title,
            "classes_of_ulp": [*EDGES, "more"],
            "probes": rows,
            "tensors": [_summary(key, distance) for key, distance in worst.items()],
            "notes": self._notes,
        }
        return (
            data,
            self._verdicts(worst, sample),
            [_said(fault, wrong[n], seen.get(n), right) for n, fault in pending.items()],
        )

    def _side(self, state: TrainState, layout: str, rates: Rates, *, is_source: bool = False) -> Side:
        """Returns the side that steps a state: by its own class, if that is installed and accepts it, or by our step.

        A target that its own framework can't load is no continuation of the run, which is said where the updates are
        compared; of a source nothing is asked, and our step takes the place.
        """
        schema, variant = state.optimizer.kinds[0]
        kind = class_of(layout, schema, str(variant))
        title = _ours(state)
        if state.optimizer.several:
            return Side(state, "statekit.optim, each optimizer by its own step")
        if kind is None:
            return Side(state, title)
        if kind.missing:
            packages = " and ".join(kind.missing)
            self._notes.append(
                f"{kind.name} needs {packages}, not installed here: {title} steps in its place"
            )
            return Side(state, title)
        try:
            runner = kind.runner(schema, str(variant))
            side = Side(state, kind.title, runner, kind.sqrt_units, execution=kind.execution)
        except ImportError as error:
            self._notes.append(f"{kind.name} can't be imported: {error}; {title} steps in its place")
            return Side(state, title)
        try:  # whether it takes what is stepped
            loaded = side.after(NumpyBackend(), (), rates)
        except _OF_THE_MACHINE:
            raise
        except StatekitError as error:
            self._notes.append(f"{kind.name} isn't run: {error.line}; {title} steps in its place")
            return Side(state, title)
        except Exception as error:  # whatever a framework raises
            refuse_short_memory(error)
            if is_source:
                self._notes.append(f"{kind.name} isn't run: {_raised(error)}; {title} steps in its place")
                return Side(state, title)
            return side
        return replace(side, changed=_as_loaded(side, loaded))

    def _as_in_their_files(self, source: Side, target: Side) -> tuple[Side, Side]:
        """Returns both sides; our step takes the place of a class that casts slots of its own run when it loads them.

        What such a class makes of its file is another run than the one that was saved. A target is held to its file
        only where the source's own program casts the same tensors alike: any other cast is the target's fault.
        """
        if not any(_CASTS in how for how in source.changed.values()):
            return source, target
        self._notes += [
            f"{name} of {path}: {how}; our step takes its place"
            for (path, name), how in source.changed.items()
        ]
        if target.changed and target.changed.items() <= source.changed.items():
            target = Side(target.state, f"{_ours(target.state)}: {target.title} casts as in the source's run")
        return Side(source.state, _ours(source.state)), target

    def _twin(self, sample: Sample) -> TrainState:
        """Returns a state whose stepped parameters have the slots of others of their kind, if there are any."""
        expected = self._states[1]
        others = {path: other for other, path in sample.stands_for.items()}
        paths = tuple(others.get(path, path) for path in sample.paths)
        windows = {others.get(path, path): window for path, window in sample.windows.items()}
        window_state = Sample(paths, windows).of(expected)
        slots = {
            path: window_state.slots[other]
            for path, other in zip(sample.paths, paths, strict=True)
            if other in window_state.slots
        }
        return replace(sample.of(expected), slots=slots) if slots else sample.of(expected)

    def _probe(
        self,
        probe: Probe,
        xp: Backend,
        sides: tuple[Side, Side],
        before: TrainState,
        right: TrainState,
        rates: Rates,
    ) -> tuple[_Ran, Bounds]:
        alike = before.optimizer.kinds == right.optimizer.kinds
        roots = max(xp.sqrt_units, *(side.sqrt_units for side in sides))
        names = _relabelling(before, right)
        executions = [side.execution for side in sides]
        of_target = bounds(right, probe.updates, rates, roots, executions[1])
        is_same = alike and executions[0] == executions[1]
        of_source = of_target if is_same else bounds(before, probe.updates, rates, roots, executions[0])
        both = None if alike else rules(before, right, probe.updates, rates, roots, executions[1])
        if probe.name == NOT_A_NUMBER:
            self._notes.append(_of_nan(of_source, of_target))
        of_reference = self._of_source(sides[0], xp, probe, rates)
        try:
            of_class = sides[1].after(xp, probe.updates, rates)
        except (StatekitError, *_OF_THE_MACHINE):
            raise
        except Exception as error:  # whatever a framework raises: it doesn't take what the target holds
            refuse_short_memory(error)
            fault = f"{sides[1].title} doesn't go on with it: {_raised(error)}"
            return _Ran({key: Worst(faults=(fault,)) for key in of_target.intervals}), of_target
        starts = arrays(before)
        encoded = {*encoded_paths(right)} ^ {*encoded_paths(before)}
        ran = _Ran()
        for key in of_target.intervals:
            other = names(key)
            has_other_form = key[1] == "param" and key[0] in encoded
            reference = None if has_other_form else of_reference.get(other)
            sides_of_it = _Sides(key, other, of_class.get(key), reference, starts.get(other))
            grain = _grain(right, key[0])
            tensor = _compared(sides_of_it, of_target, of_source, both, grain * len(probe.updates), ran)
            ran.tensors[key] = self._judged(tensor, probe, alike)
        return ran, of_target

    def _of_source(self, side: Side, xp: Backend, probe: Probe, rates: Rates) -> Arrays:
        """Returns the source's tensors after a probe, by our step where its own class fails at the gradients."""
        try:
            return side.after(xp, probe.updates, rates)
        except (StatekitError, *_OF_THE_MACHINE):
            raise
        except Exception as error:  # whatever a framework raises
            refuse_short_memory(error)
            if side.native is None:
                raise
            self._notes.append(
                f"{side.title} fails on {probe.name}: {_raised(error)}; our step takes its place there"
            )
            return Side(side.state, "").after(xp, probe.updates, rates)

    def _judged(self, compared: _Compared, probe: Probe, alike: bool) -> Worst:
        """Returns what a tensor's values after a probe say of it."""
        faults = []
        if compared.target:
            faults.append(
                f"{compared.target} elements leave the bound of the target's rule on {probe.name}: {compared.example}"
            )
        if compared.source:
            faults.append(
                f"{compared.source} elements of the source's side leave the bound of its own rule on {probe.name}"
            )
        parted = compared.parted if compared.rule else 0.0
        if compared.rule and self._allowed <= Exactness.ROUNDING and not (probe.is_extreme and not alike):
            faults.append(
                f"the two rules part by {compared.parted:.2g} of an update on {probe.name}, "
                "which no difference explains"
            )
        return Worst(
            compared.unequal, compared.ulps, compared.relative, compared.ratio, tuple(faults), parted
        )

    def _verdicts(self, worst: Mapping[Key, Worst], sample: Sample) -> dict[str, tuple[Verdict, str]]:
        verdicts: dict[str, tuple[Verdict, str]] = {}
        for (path, name), distance in worst.items():
            verdict: tuple[Verdict, str] = "bit-exact", ""
            if distance.faults:
                verdict = "refuted", distance.faults[0]
            elif self._allowed > Exactness.ROUNDING:
                verdict = (
                    "semantic difference",
                    "the target's rule makes other updates, as the rule difference says",
                )
            elif distance.unequal:
                verdict = "within the rounding bound", "bits kept; its updates differ by rounding"
            for other in (path, *(key for key, stepped in sample.stands_for.items() if stepped == path)):
                key = f"params/{other}" if name == "param" else f"slots/{other}/{name}"
                # What stands for others says of their rule, not of their values: these have digests.
                verdicts[f"{path}/{name}" if path.startswith("groups/") else key] = verdict
        return verdicts


@dataclass(frozen=True)
class _Sides:
    """One tensor: its keys by the two rules, and its values; None on a side that lacks it."""

    key: Key
    other: Key
    theirs: Array | None
    ours: Array | None
    before: Array | None


@dataclass(frozen=True)
class _Compared:
    """One tensor after a probe; numbers are those of `Worst`, and elements that leave a bound."""

    source: int = 0
    target: int = 0
    rule: int = 0
    parted: float = 0.0
    unequal: int = 0
    ulps: float = 0.0
    relative: float = 0.0
    ratio: float = 0.0
    example: str = ""


def _of_nan(of_source: Bounds, of_target: Bounds) -> str:
    """Says what the rules make of a NaN in each gradient."""
    source, target = (
        (
            sum(int(np.isnan(value).sum()) for value in tensor.exact.values()),
            sum(map(np.size, tensor.exact.values())),
        )
        for tensor in (of_source, of_target)
    )
    if not source[0] and not target[0]:
        return "a NaN in each gradient is passed over, as both rules have it"
    place = f"{target[0]} of {target[1]}"
    where = "" if source == target else f", {source[0]} of {source[1]} by the source's"
    return f"a NaN in each gradient makes {place} elements NaN by the target's rule{where}"


def _grain(state: TrainState, path: str) -> float:
    """Returns the rounding unit of what a parameter is stored in, with its slots, in units of float32's."""
    stored = [*state.slots.get(path, {}).values(), *([state.params[path]] if path in state.params else [])]
    units = [float(float_info(tensor.dtype).eps) for tensor in stored if "float" in tensor.dtype.name]
    return max(units, default=float(np.finfo(np.float32).eps)) / float(np.finfo(np.float32).eps)


_CASTS = "casts it from"


def _ours(state: TrainState) -> str:
    """Returns what our own step of a state is called."""
    schema, variant = state.optimizer.kinds[0]
    return f"statekit.optim.{schema}, variant {variant}"


def _as_loaded(side: Side, there: Arrays) -> dict[Key, str]:
    """Returns which tensors a class has otherwise than its file once it has loaded it, and how."""
    changes = {}
    for key, stored in arrays(side.state).items():
        value = there.get(key)
        if value is not None and value.dtype != stored.dtype:
            # A count or threshold of a whole group, as a Python number, is a 0-d array of what width there is.
            if key[0].startswith("groups/") and np.array_equal(value.astype(stored.dtype), stored):
                continue
            changes[key] = f"{side.title} {_CASTS} {stored.dtype.name} to {value.dtype.name} when it loads it"
        elif value is not None and value.tobytes() != stored.tobytes():
            changes[key] = f"{side.title} has other values once it has loaded it"
    return changes


def _compared(
    it: _Sides, bound: Bounds, of_source: Bounds, both: Rules | None, roundings: float, ran: _Ran
) -> _Compared:
    """Compares one tensor after a probe, element by element.

    Args:
        it: Its values.
        bound: Of the target's rule.
        of_source: Of the source's.
        both: The two rules; None if they are one.
        roundings: How many units of float32 storing may have rounded away in the updates.
        ran: What is summed over all tensors.
    """
    interval = bound.intervals[it.key]
    size = int(np.size(interval.low))
    if it.theirs is None or it.theirs.shape != np.shape(interval.low):
        ran.outside["target"] += size
        return _Compared(target=size, unequal=size, example="it isn't there, or has another shape")
    beyond = bound.beyond(it.key, it.theirs)
    target, example = int(np.sum(beyond)), ""
    ran.outside["target"] += target
    ran.undecided += int(np.sum(bound.undecided(it.key)))
    if target:
        at = tuple(int(i) for i in np.argwhere(beyond)[0])
        low, high = (np.broadcast_to(end, beyond.shape)[at] for end in (interval.low, interval.high))
        example = f"{list(at)} is {float(it.theirs[at]):.9g}, beyond [{low:.9g}, {high:.9g}]"
    if it.ours is None or it.before is None or it.ours.shape != it.theirs.shape:
        return _Compared(target=target, example=example)
    source = int(np.sum(of_source.beyond(it.key if both is None else it.other, it.ours)))
    ran.outside["source"] += source
    with np.errstate(all="ignore"):
        reference, compared = it.ours.astype(np.float64), it.theirs.astype(np.float64)
        apart, unit = gap(compared, reference), ulp(reference, it.ours.dtype)
        ulps = np.where(apart == 0, 0.0, apart / unit)
        moves = np.abs(reference - it.before.astype(np.float64))
        moved = float(np.max(moves[np.isfinite(moves)], initial=0.0))
        width = np.nan_to_num(interval.high - interval.low, nan=0.0, posinf=0.0)
        ratio = np.where((apart == 0) | bound.undecided(it.key), 0.0, apart / width)
        rule, parted = 0, 0.0
        if both is not None and it.other in both.source:
            exact = both.source[it.other].astype(np.float64)
            between = gap(exact, both.target.exact[it.key].astype(np.float64))
            # In low precision the two in float64 part by what they stored in between, as exact as that is.
            stored = roundings * (
                unit + (moved * float(np.finfo(np.float32).eps) if roundings > _SINGLE else 0.0)
            )
            rule = int(np.sum(both.target.beyond(it.key, exact) & ~(between <= stored)))
            parted = _over(float(np.max(between, initial=0.0)), moved)
    ran.outside["rule"] += rule
    ran.histogram = [a + b for a, b in zip(ran.histogram, _classes(ulps), strict=True)]
    return _Compared(
        source,
        target,
        rule,
        parted,
        int(np.count_nonzero(apart)),
        float(np.max(ulps, initial=0.0)),
        _over(float(np.max(apart, initial=0.0)), moved),
        float(np.max(ratio, initial=0.0)),
        example,
    )


def _over(top: float, bottom: float) -> float:
    return top / bottom if bottom else float(np.inf if top else 0.0)


def _classes(ulps: Any) -> list[int]:
    """Returns how many elements differ by no more than each edge, and by more than the one before; the rest last."""
    places = np.searchsorted(np.asarray(EDGES), np.nan_to_num(ulps.ravel(), nan=np.inf), side="left")
    return [int(n) for n in np.bincount(places, minlength=len(EDGES) + 1)]


def _raised(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def _probes(
    gradients: str,
    states: tuple[TrainState, TrainState],
    sample: Sample,
    updates: int,
    seed: int,
    budget: Budget | None,
) -> Iterator[tuple[Iterator[Probe], dict[str, Any]]]:
    """Gives the probes, and what a certificate says of the file that they are from, if they are."""
    whole, stepped = states
    if gradients in KINDS:
        yield drawn(stepped, KINDS[gradients], updates, seed), {}
        return
    with gradients_of(Path(gradients), whole, sample, updates, budget) as given:
        yield iter([given.probe(sample, stepped, updates)]), {"gradients_file": given.to_json()}


def _relabelling(before: TrainState, right: TrainState) -> Callable[[Key], Key]:
    """Returns what the source's rule calls a tensor that has another name in the target's."""
    names = {"v_row": "v_col", "v_col": "v_row"}
    turned = {
        path
        for path, rule in right.rules.items()
        if rule.factored and path in before.rules and before.rules[path].axes == swapped(rule.axes)
    }
    return lambda key: (key[0], names.get(key[1], key[1])) if key[0] in turned else key


def _newly_seen(
    wrong: Mapping[str, TrainState | None],
    bound: Bounds,
    probe: Probe,
    rates: Rates,
    tell: Callable[[str], object],
) -> dict[str, dict[str, Any]]:
    """Returns where each control that a probe shows is seen, by name; a control may have no wrong state."""
    seen: dict[str, dict[str, Any]] = {}
    for name, state in wrong.items():
        if state is None:
            continue
        tell(f"{probe.name}, control: {name}")
        if (detected := _detected(state, bound, probe, rates)) is not None:
            seen[name] = {"by": probe.name, **detected}
    return seen


def _detected(wrong: TrainState, bound: Bounds, probe: Probe, rates: Rates) -> dict[str, Any] | None:
    """Returns where a wrong state is seen after a probe; None if it isn't."""
    xp = NumpyBackend()
    after = arrays(store(xp, run(xp, wrong, probe.updates, rates), wrong))
    outside = {key: count for key, count in bound.outside(after).items() if count}
    if not outside:
        return None
    (path, name), count = max(outside.items(), key=lambda pair: pair[1])
    return {
        "tensors": len(outside),
        "elements": sum(outside.values()),
        "most_in": f"{path} {name}",
        "there": count,
    }


def _said(
    control: Control, wrong: TrainState | None, seen: Mapping[str, Any] | None, right: TrainState
) -> dict[str, Any]:
    """Returns the result of a control for the certificate."""
    row: dict[str, Any] = {"name": control.name, "detected": seen is not None}
    if seen is not None:
        return {**row, "in_the_update": dict(seen)}
    if wrong is None:
        return {**row, "because": f"nothing to see it by: {control.lacks}"}
    changed = arrays(wrong)
    differ = [key for key, value in arrays(right).items() if changed[key].tobytes() != value.tobytes()]
    by = "its bits" if differ else "names and numbers beside tensors"
    return {**row, "because": f"no update of the probes leaves the bound; it is seen by {by} alone"}


def _row(probe: Probe, ran: _Ran) -> dict[str, Any]:
    tensors = ran.tensors.values()
    return {
        "name": probe.name,
        "updates": len(probe.updates),
        "outside": ran.outside,
        "undecided": ran.undecided,
        "ulps": max((tensor.ulps for tensor in tensors), default=0.0),
        "relative": max((tensor.relative for tensor in tensors), default=0.0),
        "ratio": max((tensor.ratio for tensor in tensors), default=0.0),
        "histogram": ran.histogram,
    }


def _summary(key: Key, worst: Worst) -> dict[str, Any]:
    numbers = {"ulps": worst.ulps, "relative": worst.relative, "ratio": worst.ratio}
    parted = {"parted": worst.parted} if worst.parted else {}
    return {"path": key[0], "tensor": key[1], "unequal": worst.unequal, **numbers, **parted}
