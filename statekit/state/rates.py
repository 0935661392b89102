"""The learning rate of a run as a function of the updates done, whatever system's schedule made it.

A schedule is a row of pieces, each of one kind from the update where it begins: what the schedules of PyTorch,
Transformers, MXNet, T5X, icefall, Optax and Keras come to, exactly, where they depend on nothing but the number of
updates. What does (losses, epochs of unknown length) has no such form, and is said by name. `schedules` reads each
system's own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from statekit.tensors.tree import plain

Kind: TypeAlias = Literal[
    "constant", "linear", "polynomial", "cosine", "restarts", "exponential", "step", "multistep", "rsqrt",
    "inverse", "eden", "product",
]  # fmt: skip
_RATES = ("rate", "start", "end", "floor")
"""The numbers of a piece that are learning rates."""


@dataclass(frozen=True)
class Piece:
    """A part of a schedule.

    Attributes:
        kind: Which formula.
        begins: The number of updates done from which on it holds.
        origin: The number of updates done at which its own count is 0.
        numbers: What the formula needs:
            constant     rate
            linear       start, end, steps: from one rate to the other, and then the other
            polynomial   start, end, steps, power: end + (start - end) (1 - t / steps)^power, and then end
            cosine       start, end, steps: end + (start - end) (1 + cos(pi t / steps)) / 2
            restarts     start, end, steps: the same, from the start again whenever it has come to the end
            exponential  start, factor, every: start factor^(t / every)
            step         the same with whole steps: start factor^floor(t / every)
            multistep    start, factor, at: start factor^n after n of the numbers of updates in `at`
            rsqrt        start, shift: start / sqrt((t + shift) / shift)
            inverse      start, factor, every, stairs: start / (1 + factor t / every), of whole `every` with stairs
            eden         start, scale, power, every: start (1 + (n / scale)^2)^-power with n = floor(t / every)
            product      of: the product of other pieces, each with an origin of its own
            Any kind may have a `floor`: it is at least that.
    """

    kind: Kind
    begins: int
    origin: int
    numbers: Mapping[str, Any]

    def rate(self, updates: int) -> float:
        """Returns the learning rate of the update after so many."""
        value, floor = self._value(updates), self.numbers.get("floor")
        return float(value if floor is None else max(value, floor))

    def _value(self, updates: int) -> float:
        done, numbers = updates - self.origin, self.numbers
        match self.kind:
            case "constant":
                return float(numbers["rate"])
            case "linear":
                part = min(max(done, 0), numbers["steps"]) / numbers["steps"]
                return float(numbers["start"] + (numbers["end"] - numbers["start"]) * part)
            case "polynomial":
                left = 1 - min(max(done, 0), numbers["steps"]) / numbers["steps"]
                falls = _power(left, numbers["power"])
                return float(numbers["end"] + (numbers["start"] - numbers["end"]) * falls)
            case "cosine" | "restarts":
                turned = done if self.kind == "cosine" else done % numbers["steps"]
                turn = math.cos(math.pi * turned / numbers["steps"])
                return float(numbers["end"] + (numbers["start"] - numbers["end"]) * (1 + turn) / 2)
            case "exponential":
                return float(numbers["start"] * _power(numbers["factor"], done / numbers["every"]))
            case "step":
                return float(numbers["start"] * _power(numbers["factor"], max(done, 0) // numbers["every"]))
            case "multistep":
                return float(numbers["start"] * _power(numbers["factor"], bisect_right(numbers["at"], done)))
            case "rsqrt":
                return float(numbers["start"] / math.sqrt((done + numbers["shift"]) / numbers["shift"]))
            case "inverse":
                part = done // numbers["every"] if numbers["stairs"] else done / numbers["every"]
                return float(numbers["start"] / (1 + numbers["factor"] * part))
            case "eden":
                part = (done // numbers["every"]) / numbers["scale"]
                return float(numbers["start"] * (1 + part**2) ** -numbers["power"])
            case "product":
                return float(math.prod(number.rate(updates) for number in numbers["of"]))

    def times(self, factor: float) -> Piece:
        """Returns the piece with all of its rates multiplied by a factor, which isn't negative."""
        numbers = dict(self.numbers)
        if self.kind == "product":
            first, *others = numbers["of"]
            numbers["of"] = (first.times(factor), *others)
        numbers |= {name: numbers[name] * factor for name in _RATES if name in numbers}
        return replace(self, numbers=numbers)

    def moved(self, updates: int) -> Piece:
        """Returns the piece moved later by a number of updates."""
        numbers = self.numbers
        if self.kind == "product":
            numbers = {**numbers, "of": tuple(number.moved(updates) for number in numbers["of"])}
        return replace(self, begins=self.begins + updates, origin=self.origin + updates, numbers=numbers)

    def to_json(self) -> dict[str, Any]:
        """Returns the piece as plain data."""
        numbers = {
            name: [part.to_json() for part in value] if name == "of" else plain(value)
            for name, value in self.numbers.items()
        }
        return {"kind": self.kind, "begins": self.begins, "origin": self.origin, **numbers}


def _power(base: float, exponent: float) -> float:
    """Returns a power; infinity if it overflows, as in every system's arrays."""
    try:
        return float(float(base) ** exponent)
    except (OverflowError, ZeroDivisionError):
        return math.inf


def piece(kind: Kind, begins: int = 0, origin: int = 0, **numbers: Any) -> Piece:
    """Returns a piece of these numbers."""
    return Piece(kind, begins, origin, numbers)


@dataclass(frozen=True)
class Rates:
    """A schedule of the learning rate in canonical form: its pieces, the first from update 0 on."""

    pieces: tuple[Piece, ...]

    def at(self, updates: int) -> Piece:
        """Returns the piece that holds after so many updates."""
        return next(
            part for part in reversed(self.pieces) if part.begins <= updates or part is self.pieces[0]
        )

    def rate(self, updates: int) -> float:
        """Returns the learning rate of the update after so many."""
        return self.at(updates).rate(updates)

    def times(self, factor: float) -> Rates:
        """Returns the schedule with all of its rates multiplied by a factor, which isn't negative."""
        return self if factor == 1 else Rates(tuple(part.times(factor) for part in self.pieces))

    @property
    def turns(self) -> frozenset[int]:
        """Numbers of updates done at which another formula holds, or one takes its first turn, and those beside."""
        ends = {int(end) for part in self.pieces for end in _ends(part) if math.isfinite(end)}
        return frozenset(max(end + by, 0) for end in ends for by in (-1, 0, 1))

    @property
    def end(self) -> int | None:
        """The number of updates done from which on no program means the formula; None if it holds for ever."""
        last = self.pieces[-1]
        return math.ceil(last.origin + last.numbers["steps"]) if last.kind == "cosine" else None

    def turned(self, updates: int) -> float:
        """Returns how large the argument of the formula's function is: its rounding is of that size."""
        return _argument(self.at(updates), updates)

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the pieces as plain data."""
        return [part.to_json() for part in self.pieces]


def _argument(piece_of_rate: Piece, updates: int) -> float:
    done = abs(updates - piece_of_rate.origin)
    if piece_of_rate.kind in ("cosine", "restarts"):
        return float(math.pi * done / piece_of_rate.numbers["steps"])
    if piece_of_rate.kind in ("exponential", "step") and piece_of_rate.numbers["factor"] > 0:
        return float(abs(math.log(piece_of_rate.numbers["factor"])) * done / piece_of_rate.numbers["every"])
    return max((_argument(part, updates) for part in piece_of_rate.numbers.get("of", ())), default=0.0)


def _ends(piece_of_rate: Piece) -> Iterator[float]:
    yield piece_of_rate.begins
    for name in ("steps", "every"):
        if name in piece_of_rate.numbers:
            yield piece_of_rate.origin + piece_of_rate.numbers[name]
    yield from (piece_of_rate.origin + count for count in piece_of_rate.numbers.get("at", ()))
    for part in piece_of_rate.numbers.get("of", ()):
        yield from _ends(part)


Told: TypeAlias = Rates | str
"""A schedule's canonical form, or why it has none."""


def joined(parts: Sequence[Rates], bounds: Sequence[int]) -> Rates:
    """Returns schedules one after the other; each is asked for the updates done since it began.

    Args:
        parts: The schedules.
        bounds: How many updates are done when each but the first begins.
    """
    pieces: list[Piece] = []
    for rates, begins, ends in zip(parts, [0, *bounds], [*bounds, math.inf], strict=True):
        pieces += [
            rate_piece
            for rate_piece in (moved_rates.moved(begins) for moved_rates in rates.pieces)
            if rate_piece.begins < ends
        ]
    return Rates(tuple(pieces))


def product(*factors: Rates) -> Rates:
    """Returns the product of schedules; a piece for each stretch in which none of them changes its formula."""
    pieces: list[Piece] = []
    for begins in sorted({rates_at.begins for rates in factors for rates_at in rates.pieces}):
        scale, others = 1.0, list[Piece]()
        for rates_at in (rates.at(begins) for rates in factors):
            if rates_at.kind == "constant" and "floor" not in rates_at.numbers:
                scale *= rates_at.numbers["rate"]
            else:
                others.append(replace(rates_at, begins=begins))
        if not others:
            pieces.append(piece("constant", begins, begins, rate=scale))
        elif len(others) == 1:
            pieces.append(others[0] if scale == 1.0 else others[0].times(scale))
        else:
            pieces.append(piece("product", begins, begins, of=(others[0].times(scale), *others[1:])))
    return Rates(tuple(pieces))
