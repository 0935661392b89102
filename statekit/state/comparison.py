"""In what one canonical state differs from another: by name, shape, dtype, bits, counts, hyperparameters, schedule.

It is the one comparison of states: of a live run with its checkpoint, and of two checkpoints, whatever systems they are
of. Slots that one of them hasn't made yet are equal to zeros before the first update of their parameter, and only then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

from statekit.errors import some
from statekit.state.factoring import swapped
from statekit.state.hyperparameters import Alike, alike
from statekit.state.options import RATE_NAMES
from statekit.state.rates import Rates
from statekit.state.run import BUFFERS, KERAS_SCHEDULE, RunPart, RunState, Schedule, run_of
from statekit.state.schedules.called import KEY as CALLED
from statekit.state.schema import WEIGHTS, load_schema
from statekit.state.train_state import Group, TrainState
from statekit.tensors.distance import Distance, distance
from statekit.tensors.tensor import Tensor, chunks, nbytes, parts_of
from statekit.tensors.tree import Tree, plain

What: TypeAlias = Literal[
    "rule", "missing", "extra", "shape", "dtype", "values", "updates", "option", "moved", "schedule", "later",
    "part",
]  # fmt: skip
"""In what something differs. `missing`: only the right state has it; `extra`: only the other has it; `later`: schedules
stand at the same step, and give other rates; which rate the next update has is an option of its group."""
_PARTS = ("scaler", "accumulation")
"""Parts of a run whose records are compared; of the others only whether they are there can be said."""
_TURNED = {"v_row": "v_col", "v_col": "v_row"}
_OTHER_WAY = "v_row and v_col: each calls the other's row column; compared by the axes that are averaged away"
_UNMADE = (
    "slots that only one has before the first update, of parameters whose values weren't read: zeros are none"
)
_SAID: Mapping[Alike, str] = {"off": "both switch it off", "as float32": "are equal as float32"}
"""What is said of hyperparameters that are alike, but not equal."""
_COUNTS = (0, 1, 2, 3, 5, 10, 20, 50, 100, 1000, 10_000, 100_000, 1_000_000)
"""Updates done at which two schedules of other forms are held against each other first."""
_BETWEEN = frozenset(round(1.1**i) for i in range(146))
"""Those at which they are then, beside the turns of both: each a tenth more, up to a million."""

Rate: TypeAlias = Callable[[int], float]
"""The learning rate of the update after so many."""
_OTHER_FORM = "schedules of other forms: they give the same rates but for how their formulas round"

_CALLED = "the schedule's function, of which a state has the rate alone that it gave last"


@dataclass(frozen=True)
class Difference:
    """Something in which a state isn't the right one.

    Attributes:
        what: In what.
        place: Its canonical name: `params/<path>`, `slots/<path>/<slot>`, `groups/<path>/<hyperparameter>`, ...
        expected: What the right state has there.
        actual: What the other has.
        path: The parameter, if it is of one.
        item: The slot or hyperparameter, or the field of a schedule.
        distance: How far values are apart, where they were compared.
    """

    what: What
    place: str
    expected: Any = None
    actual: Any = None
    path: str = ""
    item: str = ""
    distance: Distance | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the difference as plain data."""
        values = {"expected": plain(self.expected), "actual": plain(self.actual)}
        named = {name: value for name in ("path", "item") if (value := getattr(self, name))}
        apart = {} if self.distance is None else {"distance": self.distance.to_json()}
        return {"what": self.what, "place": self.place, **named, **values, **apart}


@dataclass(frozen=True)
class Comparison:
    """What two states have in common, and what they haven't.

    Attributes:
        differences: In what the other isn't the right one, in the right one's order.
        tensors: How many tensors were compared by value.
        bytes_read: Bytes of the right state's values that were read for it.
        unsaid: What only one of them says, so that it can't be compared, a sentence each.
        normalised: What is written otherwise and means the same, a sentence each.
    """

    differences: tuple[Difference, ...]
    tensors: int
    bytes_read: int
    unsaid: tuple[str, ...]
    normalised: tuple[str, ...] = ()


def compare_states(
    right: TrainState,
    other: TrainState,
    *,
    by_value: Callable[[str], bool] = lambda path: True,
    on_tensor: Callable[[str, int], object] = lambda name, size: None,
    sides: tuple[str, str] = ("the first", "the second"),
    rates: Mapping[int, Rate] = {},
    length: int | None = None,
) -> Comparison:
    """Compares a state with another that is taken for the right one; values are read block by block.

    Args:
        right: What is taken for the right one.
        other: The other; a tensor of it of which this process has parts is compared there alone.
        by_value: Tells of a parameter whether its values and its slots' are compared, or shapes and dtypes alone.
        on_tensor: Told the name and the size in bytes of each tensor before it is compared.
        sides: What the two are called where only one says something.
        rates: What schedules of the other do to its groups, by their numbers, where no state says it.
        length: Updates of the other's run in all, as far as its schedule knows it.
    """
    return _States(right, other, by_value, on_tensor, sides, rates, length).compared()


@dataclass
class _Read:
    tensors: int = 0
    size: int = 0


def _value_of(schedule: Schedule, item: str) -> Any:
    """Returns what a schedule says of an item; without its kind, nothing tells that it has no parameters."""
    value = plain(getattr(schedule, item))
    return value or None if item == "parameters" and schedule.kind is None else value


class _States:
    """Two states that are compared."""

    def __init__(
        self,
        right: TrainState,
        other: TrainState,
        by_value: Callable[[str], bool],
        on_tensor: Callable[[str, int], object],
        sides: tuple[str, str],
        rates: Mapping[int, Rate],
        length: int | None,
    ) -> None:
        self._right, self._other = with_still(right, other), with_still(other, right)
        self._by_value, self._on_tensor = by_value, on_tensor
        self._read, self._sides = _Read(), sides
        self._runs = run_of(right.extra), run_of(other.extra)
        self._forms, self._rates = _forms(right, other, self._runs, rates), rates
        self._lengths = length_of(self._runs[0]), length
        self._unsaid: dict[str, None] = {}
        self._normalised: dict[str, None] = {}

    def compared(self) -> Comparison:
        differences = tuple(self._all())
        read = self._read
        return Comparison(differences, read.tensors, read.size, tuple(self._unsaid), tuple(self._normalised))

    def _all(self) -> Iterator[Difference]:
        right, other = self._right, self._other
        kinds = [{schema for schema, _ in state.optimizer.kinds} for state in (right, other)]
        alone = [kind for kind in kinds if kind == {WEIGHTS}]
        if kinds[0] != kinds[1]:
            yield _differing("rule", "optimizer", [" and ".join(sorted(kind)) for kind in kinds])
        for schema, theirs_of, mine_of in _variants(right, other):
            yield _differing("rule", f"variant/{schema}", [theirs_of, mine_of])
        for path in _both(right.params, other.params):
            actual, wanted = other.params.get(path), right.params.get(path)
            yield from self._pair(f"params/{path}", path, "", wanted, actual)
            if not alone and actual is not None and wanted is not None:
                yield from self._of_param(path)
        yield from self._buffers()
        yield from self._beside()
        yield from self._counts()
        if alone or kinds[0] != kinds[1]:
            return
        yield from self._rules()
        yield from self._options()
        yield from self._group_slots()
        yield from self._schedules(*(run.schedules for run in self._runs))
        yield from self._parts(*self._runs)

    def _of_param(self, path: str) -> Iterator[Difference]:
        right, other = self._right, self._other
        due, done = (state.counts.behind.get(path, state.counts.updates) for state in (right, other))
        if self._counts_differ(due, done):
            yield Difference("updates", f"updates/{path}", due, done, path)
        slots = [state.slots.get(path, {}) for state in (right, other)]
        if self._is_turned(path):
            slots[1] = {_TURNED.get(name, name): slot for name, slot in slots[1].items()}
            self._normalised[_OTHER_WAY] = None
        for name in _both(*slots):
            wanted, actual = (slot.get(name) for slot in slots)
            place = f"slots/{path}/{name}"
            present = wanted if actual is None else actual if wanted is None else None
            if present is not None and not due and not done:
                if not self._by_value(path):
                    self._unsaid[_UNMADE] = None
                    continue
                if is_zero(present):
                    continue
            yield from self._pair(place, path, name, wanted, actual)

    def _is_turned(self, path: str) -> bool:
        """Tells whether one state's rows are the other's columns; slots are then compared by their axes."""
        wanted, actual = (state.rules.get(path) for state in (self._right, self._other))
        return (
            wanted is not None
            and actual is not None
            and wanted.factored
            and swapped(actual.axes) == wanted.axes
        )

    def _pair(
        self, place: str, path: str, item: str, right: Tensor | None, other: Tensor | None
    ) -> Iterator[Difference]:
        """Yields the differences of a tensor from the right one; None stands for a tensor that a state lacks."""
        if right is None or other is None:
            kind: What = "missing" if other is None else "extra"
            yield Difference(kind, place, _described(right), _described(other), path, item)
            return
        if right.shape != other.shape:
            yield Difference("shape", place, right.shape, other.shape, path, item)
            return
        apart = None
        if self._by_value(path):
            self._on_tensor(place, nbytes(right))
            self._read.tensors += 1
            self._read.size += nbytes(right)
            apart = distance(right, other, parts_of(other))
        if right.dtype != other.dtype:
            yield Difference("dtype", place, right.dtype.name, other.dtype.name, path, item, apart)
        if apart is not None and apart.unequal:
            yield Difference("values", place, None, None, path, item, apart)

    def _rules(self) -> Iterator[Difference]:
        for path in self._right.rules:
            wanted, actual = self._right.rules[path], self._other.rules.get(path)
            if actual is not None and wanted.axes != actual.axes and not self._is_turned(path):
                labels = [", ".join(axis.value for axis in rule.axes) for rule in (wanted, actual)]
                yield _differing("rule", f"rules/{path}", labels, path)

    def _options(self) -> Iterator[Difference]:
        groups = self._right.optimizer.group_of, self._other.optimizer.group_of
        for path in self._right.params:
            wanted, actual = (group.get(path) for group in groups)
            if wanted is None and actual is None:
                continue
            if wanted is None or actual is None:
                yield Difference("moved", f"groups/{path}", wanted is not None, actual is not None, path)
                continue
            specs = load_schema(self._right.optimizer.kind(wanted)[0]).hyperparameters
            for name in _both(wanted.hyperparameters, actual.hyperparameters):
                has = name in wanted.hyperparameters, name in actual.hyperparameters
                if not all(has):
                    self._unsaid[f"{name}: {self._sides[int(has[0])]} doesn't say it"] = None
                    continue
                values = [_value(group.hyperparameters[name], path) for group in (wanted, actual)]
                if self._is_other_option(path, name, values, specs.get(name, {})):
                    yield _differing("option", f"groups/{path}/{name}", values, path, name)

    def _is_other_option(self, path: str, name: str, values: Sequence[Any], spec: Mapping[str, Any]) -> bool:
        """Tells whether an option's values differ; notes where only their forms do."""
        how = alike(spec, *values)
        if how == "off" and self._is_on(path, spec):
            how = None
        if how is None and self._is_of_one_function(path, name, values):
            self._normalised[_OTHER_FORM] = None
            return False
        if how not in (None, "equal"):
            self._normalised[f"{name}: {values[0]!r} and {values[1]!r} {_SAID[how]}"] = None
        return how is None

    def _is_of_one_function(self, path: str, name: str, values: Sequence[Any]) -> bool:
        """Tells whether learning rates are what one function gives in the two forms of a schedule."""
        return name in RATE_NAMES and path in self._forms and self._forms[path].is_same(*values)

    def _is_on(self, path: str, spec: Mapping[str, Any]) -> bool:
        """Tells whether a parameter has slots that a hyperparameter decides on, whatever that says."""
        decided = {*spec.get("decides", {}).get("existence", ())}
        return any(decided & state.slots.get(path, {}).keys() for state in (self._right, self._other))

    def _buffers(self) -> Iterator[Difference]:
        trees = [part.extra.get(BUFFERS) for part in (self._right, self._other)]
        wanted, actual = (dict(part) if isinstance(part, Mapping) else {} for part in trees)
        for name in _both(wanted, actual):
            yield from self._pair(f"{BUFFERS}/{name}", name, "", wanted.get(name), actual.get(name))

    def _is_random(self, name: str) -> bool:
        """Tells whether a tensor is part of a random generator."""
        return any(
            part.what == "random" and _is_below(name, part.place) for run in self._runs for part in run.parts
        )

    def _beside(self) -> Iterator[Difference]:
        """Yields in what tensors differ that are no parameters and no slots: averages, statistics, summed gradients."""
        wanted, actual = (
            dict(_tensors({key: part for key, part in side.extra.items() if key != BUFFERS}, "extra"))
            for side in (self._right, self._other)
        )
        for name in filter(self._is_random, list(_both(wanted, actual))):
            wanted.pop(name, None)  # the parts of a run say of these that they aren't compared
            actual.pop(name, None)
        for name in _both(wanted, actual):
            if name in wanted and name in actual:
                yield from self._pair(name, "", "", wanted[name], actual[name])
        for side, alone in zip(self._sides, (wanted.keys() - actual, actual.keys() - wanted), strict=True):
            if alone:
                self._unsaid[f"{some(sorted(alone))}: only {side} has it"] = None

    def _counts_differ(self, due: int, done: int) -> bool:
        return due != done and self._count_both

    @property
    def _count_both(self) -> bool:
        """Whether both sides say how many updates are done, or neither does."""
        return self._right.counts.says_updates == self._other.counts.says_updates

    def _counts(self) -> Iterator[Difference]:
        """Yields where the schedules' counts differ, though equally many updates are done."""
        right, other = self._right.counts, self._other.counts
        if not self._count_both:
            silent = self._sides[int(right.says_updates)]
            self._unsaid[f"the updates done: {silent} doesn't count them"] = None
            return
        if right.updates != other.updates or right.schedule == other.schedule:
            return
        says = right.says_schedule, other.says_schedule
        if all(says):
            yield Difference("schedule", "schedule/count", right.schedule, other.schedule, item="count")
        else:
            silent = self._sides[int(says[0])]
            self._unsaid[f"the schedule's count: {silent} doesn't say it"] = None

    def _group_slots(self) -> Iterator[Difference]:
        wanted, actual = (side.optimizer.groups for side in (self._right, self._other))
        by_paths = {frozenset(group.paths): group for group in actual}
        if len(wanted) == len(actual) and {frozenset(group.paths) for group in wanted} == by_paths.keys():
            actual = tuple(by_paths[frozenset(group.paths)] for group in wanted)  # in whatever order they are
        for i, pair in enumerate(zip_longest(wanted, actual)):
            slots = [dict(side.slots) if side else {} for side in pair]
            for name in _both(*slots):
                yield from self._pair(f"groups/{i}/{name}", "", name, slots[0].get(name), slots[1].get(name))

    def _unpaired(self, right: Schedule | None, other: Schedule | None, place: str) -> Iterator[Difference]:
        """Yields the difference of a schedule that only one state has."""
        (alone,) = (schedule for schedule in (right, other) if schedule is not None)
        if alone.kind is None and alone.at is None:
            self._unsaid["a schedule that isn't told: only one has its place"] = None
        elif _is_constant(alone):
            self._normalised["a schedule that never changes the rate: the other has none"] = None
        else:
            kinds = [schedule and (schedule.kind or "unknown") for schedule in (right, other)]
            yield _differing("schedule", place, kinds)

    def _schedules(self, right: Sequence[Schedule], other: Sequence[Schedule]) -> Iterator[Difference]:
        if self._forms:
            yield from map(self._with_lengths, _parted(self._forms))
            return
        yield from self._called()
        for i, (wanted, actual) in enumerate(zip_longest(right, other)):
            place = f"schedule/{i}"
            if wanted is None or actual is None:
                yield from self._unpaired(wanted, actual, place)
                continue
            for item in ("kind", "at", "last", "parameters"):
                values = [_value_of(schedule, item) for schedule in (wanted, actual)]
                if None in values and values != [None, None]:
                    silent = self._sides[values.index(None)]
                    self._unsaid[f"the schedule's {item}: {silent} doesn't say it"] = None
                elif values[0] != values[1] and not self._is_otherwise_said(item, wanted, actual):
                    kind: What = "later" if item == "parameters" and _goes_on(wanted, actual) else "schedule"
                    yield _differing(kind, f"{place}/{item}", values, item=item)

    def _with_lengths(self, difference: Difference) -> Difference:
        """Returns a difference of schedules, with why: another number of updates in all."""
        right, other = self._lengths
        if None in self._lengths or right == other or difference.item == "at":
            return difference
        return replace(difference, item=f"max_steps {right} -> {other}: {difference.item}")

    def _called(self) -> Iterator[Difference]:
        """Yields where a function that no state holds gives another rate than the right schedule gave last."""
        schedules = [run.schedules for run in self._runs]
        if not self._rates or any(len(calls) != 1 for calls in schedules):
            return
        ((wanted,), (other_call,)) = schedules
        if wanted.at is None or wanted.at != other_call.at:
            return
        self._unsaid[_CALLED] = None
        numbers = self._right.optimizer.group_numbers
        for number, group in enumerate(self._other.optimizer.groups):
            shared = [path for path in group.paths if path in numbers]
            rate = wanted.last_of(numbers[shared[0]]) if shared else None
            if rate is None or number not in self._rates:
                continue
            form = _Form((_always(rate), self._rates[number]), (wanted.at, other_call.at))
            if form.is_told() and not form.is_same(rate, actual := form.rates[1](wanted.at)):
                item = f"rate after {wanted.at} updates"
                apart = _differing("later", f"schedule/{shared[0]}/rate", (rate, actual), shared[0], item)
                yield self._with_lengths(apart)
                return

    def _parts(self, right: RunState, other: RunState) -> Iterator[Difference]:
        parts = [_numbered(side.parts) for side in (right, other)]
        for kind, i in _both(*parts):
            sides = [part.get((kind, i)) for part in parts]
            if kind not in _PARTS:
                self._unsaid[uncompared(kind)] = None
                continue
            values = [None if side is None else plain(side.value) for side in sides]
            if values[0] != values[1]:
                yield _differing("part", kind, values, item=kind)

    def _is_otherwise_said(self, item: str, right: Schedule, other: Schedule) -> bool:
        """Tells whether two forms of a schedule are of one function, or, of two systems, can't be compared."""
        if item not in ("kind", "parameters"):
            return False
        rates = [side.rates for side in (right, other)]
        if all(rate and not any(isinstance(side, str) for side in rate) for rate in rates):
            return len(rates[0]) == len(rates[1]) and all(
                alike({}, rate.rate(count), wanted.rate(count)) is not None
                for rate, wanted in zip(*rates, strict=True)
                if not isinstance(rate, str) and not isinstance(wanted, str)
                for count in (*_COUNTS, *rate.turns, *wanted.turns)
            )
        if right.kind != other.kind and {right.place, other.place} & {KERAS_SCHEDULE, f"extra/{CALLED}"}:
            self._unsaid["the schedule: its two forms can't be compared"] = None
            return True
        return False


def with_still(state: TrainState, like: TrainState) -> TrainState:
    """Returns a state with those of its buffers among the parameters that no optimizer moves in another.

    Where nothing tells frozen parameters from batch statistics, a layout calls both buffers.
    """
    kept = state.extra.get(BUFFERS)
    buffers: Mapping[str, Any] = kept if isinstance(kept, Mapping) else {}
    others = set(like.optimizer.paths) | state.params.keys()
    still = {
        path: name
        for name in buffers
        if (path := str(name).replace(".", "/")) in like.params and path not in others
    }
    if not still:
        return state
    names = {*still.values()}
    rest = {name: buffer for name, buffer in buffers.items() if name not in names}
    params = {**state.params, **{path: buffers[name] for path, name in still.items()}}
    return replace(state, params=params, extra={**state.extra, BUFFERS: rest})


@dataclass(frozen=True)
class _Form:
    """A parameter's schedule in the forms in which two states have it.

    Attributes:
        rates: What each does.
        at: Steps that each has made; None where it doesn't count.
        turns: Numbers of updates done at which another formula may hold.
        end: Updates done when the run ends, or the formula that is right does; None if nothing says it.
        turned: How large the argument of the right formula's function is after so many updates.
    """

    rates: tuple[Rate, Rate]
    at: tuple[int | None, int | None]
    turns: frozenset[int] = frozenset()
    end: int | None = None
    turned: Callable[[int], float] = lambda updates: 0.0

    @property
    def counts(self) -> list[int]:
        """Numbers of updates done at which they are held against each other, in this order."""
        here = {step for step in self.at if step is not None}
        last = None if self.end is None else max(self.end, *here)
        first = {count for count in _COUNTS if last is None or count <= last} | here
        later = {count for count in _BETWEEN | self.turns if last is None or count <= last}
        return [*sorted(first), *sorted(later - first)]

    def is_told(self) -> bool:
        """Tells whether both are finite numbers there."""
        try:
            return all(math.isfinite(rate(count)) for rate in self.rates for count in self.counts)
        except Exception:  # whatever a user's function raises of counts to which the run never comes
            return False

    def apart(self) -> tuple[int, float, float] | None:
        """Returns after how many updates the two give other rates, and these; None if they give the same."""
        for count in self.counts:
            first, second = (rate(count) for rate in self.rates)
            if not self.is_same(first, second, count):
                return count, first, second
        return None

    def is_same(self, right: Any, other: Any, count: int | None = None) -> bool:
        """Tells whether two learning rates are the same but for how formulas of one function round.

        A formula makes less than 16 roundings in float64; one that goes on from its last rate, as PyTorch's do, four
        with each update. None is of more than the highest rate. The argument of a cosine or a power is rounded too,
        in proportion to itself: four times at most, and what comes out moves by no more than that.
        """
        if not isinstance(right, float) or not isinstance(other, float):
            return bool(right == other)
        done = max(step or 0 for step in self.at)
        roundings = 16 + 4 * done + 4 * self.turned(done if count is None else count)
        return (
            alike({}, right, other) is not None or abs(right - other) <= roundings * 2.0**-53 * self._highest
        )

    @cached_property
    def _highest(self) -> float:
        return max(abs(rate(count)) for rate in self.rates for count in self.counts)


def _forms(
    right: TrainState, other: TrainState, runs: tuple[RunState, RunState], rates: Mapping[int, Rate]
) -> dict[str, _Form]:
    """Returns each parameter's schedule if two states have it in different forms and both are known."""
    kinds = [[schedule.kind for schedule in run.schedules] for run in runs]
    if not all(kinds) or (kinds[0] == kinds[1] and not rates):
        return {}
    groups = [state.optimizer.group_numbers for state in (right, other)]
    forms: dict[str, _Form] = {}
    by_groups: dict[tuple[int, int], _Form] = {}
    for path in [path for path in groups[0] if path in groups[1]]:
        pair = groups[0][path], groups[1][path]
        if pair not in by_groups:
            form = _form(right, other, runs, rates, pair)
            if form is None:
                return {}
            by_groups[pair] = form
        forms[path] = by_groups[pair]
    return forms


def _form(
    right: TrainState,
    other: TrainState,
    runs: tuple[RunState, RunState],
    rates: Mapping[int, Rate],
    pair: tuple[int, int],
) -> _Form | None:
    """Returns the schedule of a group of each state; None where one isn't told."""
    right_rate = _rate_of(right.optimizer.groups, runs[0].schedules, pair[0], {})
    other_rate = _rate_of(other.optimizer.groups, runs[1].schedules, pair[1], rates)
    if right_rate is None or other_rate is None:
        return None
    stated = _stated(runs[0].schedules, pair[0])
    form = _Form(
        (right_rate[0], other_rate[0]),
        (right_rate[1], other_rate[1]),
        right_rate[2] | other_rate[2],
        length_of(runs[0]) or (stated.end if stated else None),
        stated.turned if stated else lambda updates: 0.0,
    )
    return form if form.is_told() else None


def length_of(run: RunState) -> int | None:
    """Returns how many updates a run has in all, as its trainer says it."""
    stated = [part.value.get("max_steps") for part in run.parts if isinstance(part.value, Mapping)]
    return next((number for number in stated if type(number) is int and number > 0), None)


def _stated(schedules: Sequence[Schedule], number: int) -> Rates | None:
    """Returns the rates of a group's schedule, if its state tells them."""
    schedule = next((schedule for schedule in schedules if schedule.moves(number)), None)
    stated = None if schedule is None else schedule.of_group(number)
    return stated if isinstance(stated, Rates) else None


def _goes_on(right: Schedule, other: Schedule) -> bool:
    """Tells whether two schedules stand at the same step and set out from the same rates."""
    return right.at is not None and (right.at, right.bases) == (other.at, other.bases)


def _rate_of(
    groups: Sequence[Group], schedules: Sequence[Schedule], number: int, rates: Mapping[int, Rate]
) -> tuple[Rate, int | None, frozenset[int]] | None:
    """Returns a group's rate as a function, its schedule's step and turns; None if the rate is unknown."""
    schedule = next((schedule for schedule in schedules if schedule.moves(number)), None)
    if schedule is None:
        options = groups[number].hyperparameters
        rate = next((plain(options[name]) for name in RATE_NAMES if name in options), None)
        return (_always(rate), None, frozenset()) if isinstance(rate, float) else None
    stated = schedule.of_group(number)
    rate_of = rates.get(number) if isinstance(stated, str) else stated.rate
    turns = frozenset[int]() if isinstance(stated, str) else stated.turns
    return None if rate_of is None else (rate_of, schedule.at, turns)


def _always(rate: float) -> Rate:
    return lambda updates: rate


def _parted(forms: Mapping[str, _Form]) -> Iterator[Difference]:
    """Yields where schedules of other forms stand elsewhere, or give other rates; of each kind the first."""
    first = {id(form): path for path, form in reversed([*forms.items()])}
    forms = {path: form for path, form in forms.items() if first[id(form)] == path}
    for path, form in forms.items():
        if None not in form.at and form.at[0] != form.at[1]:
            yield _differing("schedule", f"schedule/{path}/at", form.at, path, "at")
            break
    for path, form in forms.items():
        if (apart := form.apart()) is not None:
            count, *values = apart
            kind: What = "later" if None not in form.at and form.at[0] == form.at[1] else "schedule"
            yield _differing(kind, f"schedule/{path}/rate", values, path, f"rate after {count} updates")
            break


def uncompared(subject: str) -> str:
    """Returns what is said of parts of a run that aren't compared."""
    return f"{subject}: records of a run that have no common form"


def _is_below(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}/")


def _differing(what: What, place: str, values: Sequence[Any], path: str = "", item: str = "") -> Difference:
    """Returns a difference of two values, the right one first."""
    right, other = values
    return Difference(what, place, right, other, path, item)


def _variants(right: TrainState, other: TrainState) -> Iterator[tuple[str, str, str]]:
    """Yields the schemas that both have in different variants, with these; what a file can't tell is equal to any."""
    right_kinds, other_kinds = dict(right.optimizer.kinds), dict(other.optimizer.kinds)
    for schema, variant in right_kinds.items():
        if (wanted := other_kinds.get(schema)) is not None and variant is not None and wanted != variant:
            yield schema, variant, wanted


def is_zero(tensor: Tensor) -> bool:
    """Tells whether all values of a tensor are zero; of one of which this process has parts, the values there."""
    if (parts := parts_of(tensor)) is not None:
        return not any(tensor.read(part).any() for part in parts)
    return all(not block.any() for block in chunks(tensor))


def _is_constant(schedule: Schedule) -> bool:
    """Tells whether a schedule gives the same rate for ever."""
    pieces = [piece for rates in schedule.rates if isinstance(rates, Rates) for piece in rates.pieces]
    return len(schedule.rates) == len(pieces) > 0 and all(piece.kind == "constant" for piece in pieces)


def _tensors(node: Tree, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a tree with their canonical names."""
    if isinstance(node, Tensor):
        yield name, node
    elif isinstance(node, (Mapping, list, tuple)):
        for key, part in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _tensors(part, f"{name}/{key}")


def _numbered(parts: Iterable[RunPart]) -> dict[tuple[str, int], RunPart]:
    """Returns the parts of a run by their kind and their number among those of it."""
    kinds: Counter[str] = Counter()
    numbered: dict[tuple[str, int], RunPart] = {}
    for part in parts:
        numbered[part.what, kinds[part.what]] = part
        kinds[part.what] += 1
    return numbered


def _both(right: Iterable[Any], other: Iterable[Any]) -> list[Any]:
    """Returns the keys of both, in the order of the right one, each once."""
    return list(dict.fromkeys([*right, *other]))


def _value(value: Any, path: str) -> Any:
    """Returns one parameter's value of a hyperparameter, as plain data."""
    if isinstance(value, Mapping) and path in value:
        value = value[path]
    return plain(value)


def _described(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype.name} {list(tensor.shape)}"
