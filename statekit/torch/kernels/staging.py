"""Cuts the graph of an update into stages: what one launch can do before others have to have ended.

A sum over a tensor is known only when all of it has been read. So the stages alternate: over all elements, over the
rows and columns of matrices, and over single values of each tensor. What stands between them is small and is kept; what
has an element for each of the tensor's is computed again where it is needed, or read from the slot that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from statekit.tensors.tensor import DTYPES
from statekit.torch.kernels.traced import Traced

FULL, SIDE, SINGLE = 0, 1, 2
"""Over all elements; over rows, or columns; over one value of each tensor."""
REDUCTIONS = ("sum", "max")
WHOLE = (frozenset("N"), frozenset("RC"))


def span(value: Traced) -> int:
    """Returns over what a value reaches: FULL, SIDE or SINGLE."""
    if value.space in WHOLE:
        return FULL
    return SIDE if value.space in (frozenset("R"), frozenset("C")) else SINGLE


@dataclass
class Stage:
    """What one launch does.

    Attributes:
        time: Its place among the stages; `time % 3` is FULL, SIDE or SINGLE.
        stores: What it writes, by the array's name.
        parts: Sums of which it leaves a part from each block.
        kept: Values that it leaves to later stages.
    """

    time: int
    stores: dict[str, Traced] = field(default_factory=dict)
    parts: dict[Traced, None] = field(default_factory=dict)
    kept: dict[Traced, None] = field(default_factory=dict)

    @property
    def roots(self) -> list[Traced]:
        """All that it has to compute."""
        return [*self.stores.values(), *(part.args[0] for part in self.parts), *self.kept]


class Staging:
    """The stages of an update.

    Attributes:
        stages: In the order in which they run.
        stored_at: When each array is written, by name.
    """

    def __init__(self, outputs: Mapping[str, Traced], early: Iterable[str] = ()) -> None:
        self._place: dict[Traced, int | None] = {}
        self._outputs = dict(outputs)
        last = max(self._first(value) for value in outputs.values() if span(value) == FULL)
        self.stored_at = {
            name: last if span(value) == FULL and name not in early else self._first(value)
            for name, value in outputs.items()
        }
        self._read_back = {
            _source(value): name
            for name, value in outputs.items()
            if span(value) == FULL and (value.dtype == "float32" or is_rounded(_source(value), value.dtype))
        }
        while True:
            self._by_time: dict[int, Stage] = {}
            for name, value in outputs.items():
                stage = self._stage(self.stored_at[name])
                stage.stores[name] = value
                self._demand(stage.time, value)
            late = self._overtaken()
            if not late:
                break
            for name in late:
                self.stored_at[name] += 3
        self.stages = [self._by_time[time] for time in sorted(self._by_time)]

    @classmethod
    def cheapest(cls, outputs: Mapping[str, Traced]) -> Staging:
        """Returns the stages that move the fewest bytes: slots may be written before the last pass."""
        slots = [name for name, value in outputs.items() if span(value) == FULL and name != "param"]
        choices = [early for count in range(len(slots) + 1) for early in combinations(slots, count)]
        return min((cls(outputs, early) for early in choices), key=lambda staging: staging.traffic)

    @property
    def traffic(self) -> int:
        """The bytes that all stages read and write for each element."""
        total = 0
        for stage in self.stages:
            loads = {value for value in self.walk(stage) if value.op == "array" and span(value) == FULL}
            back = {name for value in self.walk(stage) if (name := self.read_back(value, stage.time))}
            stores = [value for value in stage.stores.values() if span(value) == FULL]
            dtypes = [
                *(value.dtype for value in (*loads, *stores)),
                *(self._outputs[name].dtype for name in back),
            ]
            total += sum(DTYPES[dtype].itemsize for dtype in dtypes)
        return total

    def place(self, value: Traced) -> int | None:
        """Returns the first stage that can compute a value; None if any can."""
        if value not in self._place:
            self._place[value] = self._placed(value)
        return self._place[value]

    def _placed(self, value: Traced) -> int | None:
        if value.shared:
            return None
        if is_cut(value):
            return _next(span(value), self._first(value.args[0]) + 1)
        places = [place for arg in value.args if (place := self.place(arg)) is not None]
        return _next(span(value), max(places)) if places else None

    def _first(self, value: Traced) -> int:
        place = self.place(value)
        return span(value) if place is None else place

    def is_kept(self, value: Traced, time: int) -> bool:
        """Tells whether a stage finds a value among what earlier ones have left."""
        place = self.place(value)
        return span(value) != FULL and place is not None and place < time

    def read_back(self, value: Traced, time: int) -> str | None:
        """Returns the array in which an earlier stage has written a value as it is."""
        name = self._read_back.get(value)
        return name if name is not None and self.stored_at[name] < time else None

    def walk(self, stage: Stage) -> Iterator[Traced]:
        """Yields what a stage takes or computes, each behind what it is made of."""
        seen: set[Traced] = set()

        def visit(value: Traced) -> Iterator[Traced]:
            if value in seen:
                return
            seen.add(value)
            if not self._is_given(value, stage.time):
                for arg in value.args:
                    yield from visit(arg)
            yield value

        for root in stage.roots:
            yield from visit(root)

    def _is_given(self, value: Traced, time: int) -> bool:
        given = value.shared or is_cut(value) or self.is_kept(value, time)
        return given or self.read_back(value, time) is not None

    def _stage(self, time: int) -> Stage:
        return self._by_time.setdefault(time, Stage(time))

    def _demand(self, time: int, root: Traced) -> None:
        """Has earlier stages leave what a stage needs for a value."""
        for value in self.walk(Stage(time, kept={root: None})):
            if self.is_kept(value, time):
                before = self._stage(self._first(value))
                if value not in before.kept:
                    before.kept[value] = None
                    self._demand(before.time, value)
            elif is_cut(value):
                before = self._stage(self._first(value.args[0]))
                if value not in before.parts:
                    before.parts[value] = None
                    self._demand(before.time, value.args[0])

    def _overtaken(self) -> list[str]:
        """Returns the arrays that are written before a later stage has read what they held."""
        read = {
            value.note: stage.time
            for stage in sorted(self._by_time.values(), key=lambda stage: stage.time)
            for value in self.walk(stage)
            if value.op == "array"
        }
        return [name for name, time in self.stored_at.items() if read.get(name, time) > time]


def _source(value: Traced) -> Traced:
    """Returns what an array is written from."""
    return value.args[0] if value.op == "narrow" else value


def is_rounded(value: Traced, dtype: str) -> bool:
    """Tells whether all that a value can be is in a dtype: rounding to it changes nothing."""
    if value.op in ("wide", "reshape", "float32"):
        return is_rounded(value.args[0], dtype)
    if value.op == "array":
        return bool(value.dtype == dtype)
    return value.op in ("rounded", "narrow") and value.note == dtype


def is_cut(value: Traced) -> bool:
    """Tells whether a value is a sum that blocks share."""
    return value.op in REDUCTIONS and span(value.args[0]) != SINGLE


def _next(kind: int, time: int) -> int:
    return time + (kind - time) % 3
