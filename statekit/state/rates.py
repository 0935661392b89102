"""The learning rate of a run as a function of the updates done, whatever system's schedule made it.

A schedule is a row of pieces, each of one kind from the update where it begins: what PyTorch's classes, Transformers'
functions and MXNet's objects come to, exactly, where they depend on nothing but the number of updates. What does
(losses, epochs, restarts) has no such form, and is said by name.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal[
    "constant", "linear", "polynomial", "cosine", "exponential", "step", "multistep", "rsqrt"
]


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
            exponential  start, factor, every, floor: start factor^(t / every), at least floor
            step         the same with whole steps: start factor^floor(t / every)
            multistep    start, factor, at: start factor^n after n of the numbers of updates in `at`
            rsqrt        start, shift: start / sqrt((t + shift) / shift)
    """

    kind: Kind
    begins: int
    origin: int
    numbers: Mapping[str, Any]

    def rate(self, updates: int) -> float:
        """Returns the learning rate of the update after so many."""
        done, numbers = updates - self.origin, self.numbers
        match self.kind:
            case "constant":
                return float(numbers["rate"])
            case "linear":
                part = min(max(done, 0), numbers["steps"]) / numbers["steps"]
                return float(numbers["start"] + (numbers["end"] - numbers["start"]) * part)
            case "polynomial":
                left = 1 - min(max(done, 0), numbers["steps"]) / numbers["steps"]
                return float(numbers["end"] + (numbers["start"] - numbers["end"]) * left ** numbers["power"])
            case "cosine":
                turn = math.cos(math.pi * done / numbers["steps"])
                return float(numbers["end"] + (numbers["start"] - numbers["end"]) * (1 + turn) / 2)
            case "exponential":
                return float(
                    max(numbers["start"] * numbers["factor"] ** (done / numbers["every"]), numbers["floor"])
                )
            case "step":
                return float(
                    max(
                        numbers["start"] * numbers["factor"] ** (max(done, 0) // numbers["every"]),
                        numbers["floor"],
                    )
                )
            case "multistep":
                return float(numbers["start"] * numbers["factor"] ** bisect_right(numbers["at"], done))
            case "rsqrt":
                return float(numbers["start"] / math.sqrt((done + numbers["shift"]) / numbers["shift"]))

    def to_json(self) -> dict[str, Any]:
        """Returns the piece as plain data."""
        return {"kind": self.kind, "begins": self.begins, "origin": self.origin, **self.numbers}


@dataclass(frozen=True)
class Rates:
    """A schedule of the learning rate in canonical form: its pieces, the first from update 0 on."""

    pieces: tuple[Piece, ...]

    def rate(self, updates: int) -> float:
        """Returns the learning rate of the update after so many."""
        return next(
            one for one in reversed(self.pieces) if one.begins <= updates or one is self.pieces[0]
        ).rate(updates)

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the pieces as plain data."""
        return [one.to_json() for one in self.pieces]


TORCH_SCHEDULES: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (kind, frozenset(keys.split()))
    for kind, keys in (
        ("Eden", "lr_batches lr_epochs"),
        ("OneCycleLR", "total_steps _anneal_func_type"),
        ("CyclicLR", "total_size step_ratio"),
        ("CosineAnnealingWarmRestarts", "T_0 T_mult"),
        ("CosineAnnealingLR", "T_max eta_min"),
        ("ReduceLROnPlateau", "factor patience num_bad_epochs"),
        ("SequentialLR", "_schedulers _milestones"),
        ("ChainedScheduler", "_schedulers"),
        ("LambdaLR", "lr_lambdas"),
        ("LinearLR", "start_factor end_factor total_iters"),
        ("PolynomialLR", "power total_iters"),
        ("ConstantLR", "factor total_iters"),
        ("StepLR", "step_size gamma"),
        ("MultiStepLR", "milestones gamma"),
        ("ExponentialLR", "gamma"),
    )
)
"""Class -> keys that its state has; the first that fits is meant. LambdaLR is also what transformers' get_scheduler
makes, of functions that no state holds.

Source: pytorch/pytorch torch/optim/lr_scheduler.py; k2-fsa/icefall egs/librispeech/ASR/zipformer/optim.py, `Eden`.
"""


def torch_kind(state: Mapping[str, Any]) -> str | None:
    """Returns the class of a schedule of PyTorch by its state; None if that doesn't tell."""
    return next((kind for kind, keys in TORCH_SCHEDULES if keys <= state.keys()), None)


Told: TypeAlias = Rates | str
"""A schedule's canonical form, or why it has none."""


def torch_rates(
    kind: str | None, state: Mapping[str, Any], base: float, arguments: Mapping[str, Any] | None
) -> Told:
    """Returns what a schedule of PyTorch or Transformers does to a group.

    Args:
        kind: Its class.
        state: Its `state_dict()`.
        base: The group's entry of its `base_lrs`.
        arguments: Those of the Trainer that made it, where they are known: a LambdaLR's state hasn't its function.

    Source: pytorch/pytorch torch/optim/lr_scheduler.py; huggingface/transformers src/transformers/optimization.py.
    """
    if type(base) not in (int, float):
        return f"the base of {kind or 'the schedule'} isn't a number"
    if kind == "LambdaLR":
        return _transformers(base, arguments) if arguments else "a LambdaLR's function is in no file"
    if kind == "SequentialLR":
        return _sequence(state, base)
    make = _TORCH.get(kind or "")
    if make is None:
        return f"{kind or 'a schedule of an unknown class'} isn't a function of the updates done that others have"
    try:
        return Rates(tuple(make(state, base)))
    except (KeyError, TypeError, ZeroDivisionError):
        return f"the state of {kind} doesn't say all of its arguments"


def _piece(kind: Kind, begins: int = 0, origin: int = 0, **numbers: Any) -> Piece:
    return Piece(kind, begins, origin, numbers)


_TORCH: Mapping[str, Callable[[Mapping[str, Any], float], list[Piece]]] = {
    "ConstantLR": lambda s, b: [
        _piece("constant", rate=b * s["factor"]),
        _piece("constant", s["total_iters"], rate=b),
    ],
    "LinearLR": lambda s, b: [
        _piece("linear", start=b * s["start_factor"], end=b * s["end_factor"], steps=s["total_iters"])
    ],
    "PolynomialLR": lambda s, b: [
        _piece("polynomial", start=b, end=0.0, steps=s["total_iters"], power=s["power"])
    ],
    "CosineAnnealingLR": lambda s, b: [_piece("cosine", start=b, end=s["eta_min"], steps=s["T_max"])],
    "ExponentialLR": lambda s, b: [_piece("exponential", start=b, factor=s["gamma"], every=1, floor=0.0)],
    "StepLR": lambda s, b: [_piece("step", start=b, factor=s["gamma"], every=s["step_size"], floor=0.0)],
    "MultiStepLR": lambda s, b: [
        _piece(
            "multistep",
            start=b,
            factor=s["gamma"],
            at=sorted(int(at) for at, count in s["milestones"].items() for _ in range(count)),
        )
    ],
}


def _sequence(state: Mapping[str, Any], base: float) -> Told:
    pieces: list[Piece] = []
    parts, bounds = state.get("_schedulers"), state.get("_milestones")
    if not isinstance(parts, Sequence) or not isinstance(bounds, Sequence) or len(parts) != len(bounds) + 1:
        return "the state of SequentialLR doesn't say its schedules"
    for part, begins, ends in zip(parts, [0, *bounds], [*bounds, math.inf], strict=True):
        rates = torch_rates(torch_kind(part), part, base, None)
        if isinstance(rates, str):
            return rates
        moved = [
            Piece(one.kind, begins + one.begins, begins + one.origin, one.numbers) for one in rates.pieces
        ]
        pieces += [one for one in moved if one.begins < ends]
    return Rates(tuple(pieces))


def _transformers(base: float, arguments: Mapping[str, Any]) -> Told:
    """Returns what `get_scheduler` makes of a Trainer's arguments."""
    kind, whole = arguments.get("lr_scheduler_type"), arguments.get("max_steps")
    warm, extra = arguments.get("warmup_steps") or 0, arguments.get("lr_scheduler_kwargs") or {}
    count = whole if type(whole) is int else 0
    needs_whole = (
        kind in ("linear", "cosine", "polynomial") or (0 < warm < 1) or arguments.get("warmup_ratio")
    )
    if needs_whole and count <= 0:
        return f"{kind}: nobody said how many updates the run has"
    if 0 < warm < 1:
        warm = math.ceil(count * warm)
    elif not warm and (ratio := arguments.get("warmup_ratio")):
        warm = math.ceil(count * ratio)
    warm = int(warm)
    first = [_piece("linear", start=0.0, end=base, steps=warm)] if warm else []
    steps = max(1, count - warm)
    match kind:
        case "constant":
            return Rates((_piece("constant", rate=base),))
        case "constant_with_warmup":
            return Rates((*first, _piece("constant", warm, rate=base)))
        case "linear":
            return Rates((*first, _piece("linear", warm, warm, start=base, end=0.0, steps=steps)))
        case "cosine" if extra.keys() <= {"num_cycles"}:
            half = steps / (2 * extra.get("num_cycles", 0.5))
            return Rates((*first, _piece("cosine", warm, warm, start=base, end=0.0, steps=half)))
        case "polynomial" if extra.keys() <= {"lr_end", "power"}:
            # Its end is said for the rate that the optimizer was made with, and scaled with a group's own.
            end = extra.get("lr_end", 1e-7) * base / arguments.get("learning_rate", base)
            power = extra.get("power", 1.0)
            return Rates(
                (*first, _piece("polynomial", warm, warm, start=base, end=end, steps=steps, power=power))
            )
        case "inverse_sqrt" if extra.keys() <= {"timescale"}:
            scale = extra.get("timescale") or warm or 10_000
            return Rates((*first, _piece("rsqrt", warm, warm, start=base, shift=scale)))
    return f"Transformers' schedule {kind} isn't one that others have"


def mxnet_rates(kind: str, state: Mapping[str, Any]) -> Told:
    """Returns what a schedule of MXNet does: it is asked for update n with n updates done before and this one.

    Source: apache/mxnet python/mxnet/lr_scheduler.py.
    """
    try:
        warm = int(state.get("warmup_steps", 0))
        first = _mxnet_warmup(state, warm)
        begins = max(warm - 1, 0)
        rest = _MXNET[kind](state, begins, warm - 1)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return f"MXNet's {kind} isn't one that others have, or its state doesn't say all of it"
    return Rates((*first, *rest))


def _mxnet_warmup(state: Mapping[str, Any], warm: int) -> list[Piece]:
    if warm < 2:  # the first update is number 1
        return []
    start, end = state["warmup_begin_lr"], state["warmup_final_lr"]
    if state["warmup_mode"] == "constant":
        return [_piece("constant", rate=start)]
    return [_piece("linear", 0, -1, start=start, end=end, steps=warm)]


_MXNET: Mapping[str, Callable[[Mapping[str, Any], int, int], list[Piece]]] = {
    "FactorScheduler": lambda s, begins, origin: [
        _piece(
            "step",
            begins,
            s["count"],
            start=s["base_lr"],
            factor=s["factor"],
            every=s["step"],
            floor=s["stop_factor_lr"],
        )
    ],
    "MultiFactorScheduler": lambda s, begins, origin: [
        _piece(
            "multistep",
            begins,
            start=s["base_lr"],
            factor=s["factor"],
            at=list(s["step"][s["cur_step_ind"] :]),
        )
    ],
    "PolyScheduler": lambda s, begins, origin: [
        _piece(
            "polynomial",
            begins,
            origin,
            start=s["base_lr_orig"],
            end=s["final_lr"],
            steps=s["max_steps"],
            power=s["power"],
        )
    ],
    "CosineScheduler": lambda s, begins, origin: [
        _piece("cosine", begins, origin, start=s["base_lr_orig"], end=s["final_lr"], steps=s["max_steps"]),
        _piece("constant", origin + s["max_steps"], rate=s["final_lr"]),
    ],
}
