"""A run's learning rate as an object of Keras or MXNet: of their own class if it is exact, else of ours.

A class that is printed has the formula itself; its object is what the optimizer takes as a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from statekit.lines.rate_code import KERAS, MATH, PYTHON, expression
from statekit.state.rates import Piece, Rates


def keras_lines(rates: Rates) -> list[str]:
    """Returns the lines that make `schedule`, of Keras, which is asked for the calls so far, `iterations`.

    Source: keras-team/keras keras/src/optimizers/schedules/learning_rate_schedule.py.
    """
    call = _keras_own(rates)
    if call is not None:
        return ["import keras", f"schedule = keras.optimizers.schedules.{call}"]
    return [
        "import keras",
        '@keras.saving.register_keras_serializable("run")',
        "class Schedule(keras.optimizers.schedules.LearningRateSchedule):",
        "    def __call__(self, step):",
        '        step = keras.ops.cast(step, "float32")',
        f"        return {expression(rates, KERAS)}",
        "    def get_config(self):",
        "        return {}",
        "schedule = Schedule()",
    ]


def _keras_own(rates: Rates) -> str | None:
    """Returns the call of Keras' own class that is exactly a schedule; None if none is."""
    first, *rest = rates.pieces
    if any("floor" in piece.numbers for piece in rates.pieces):
        return None
    if all(piece.kind in ("constant", "multistep") for piece in rates.pieces):
        changes = list(_changes(rates))
        bounds, values = [at - 1 for at, _ in changes[1:]], [rate for _, rate in changes]
        return f"PiecewiseConstantDecay({bounds!r}, {values!r})" if bounds else None
    n = first.numbers
    if not rest and first.origin == 0:
        match first.kind:
            case "linear" | "polynomial":
                power = f", power={n['power']!r}" if first.kind == "polynomial" else ""
                ends = f"end_learning_rate={float(n['end'])!r}"
                return f"PolynomialDecay({float(n['start'])!r}, {n['steps']!r}, {ends}{power})"
            case "exponential" | "step" | "inverse":
                return _keras_decay(first)
    return _keras_cosine(rates)


def _keras_decay(rate_piece: Piece) -> str:
    """Returns the call of Keras' class that is a piece which decays by a factor."""
    n = rate_piece.numbers
    name = "InverseTimeDecay" if rate_piece.kind == "inverse" else "ExponentialDecay"
    stairs = ", staircase=True" if rate_piece.kind == "step" or n.get("stairs") else ""
    return f"{name}({float(n['start'])!r}, {n['every']!r}, {n['factor']!r}{stairs})"


def _keras_cosine(rates: Rates) -> str | None:
    """Returns the call of CosineDecay that is exactly a schedule: with or without a linear warm-up, then its end."""
    kinds = [piece.kind for piece in rates.pieces]
    if kinds not in (["cosine", "constant"], ["linear", "cosine", "constant"]):
        return None
    *before, cosine, last = rates.pieces
    n, warm = cosine.numbers, cosine.begins
    ends = (cosine.origin, last.begins, last.numbers["rate"])
    if ends != (warm, warm + math.ceil(n["steps"]), n["end"]) or not n["start"] or len(before) != bool(warm):
        return None
    start, warmed = n["start"], ""
    for rising in before:
        if (rising.origin, rising.numbers["steps"], rising.numbers["end"]) != (0, warm, start):
            return None
        warmed = f", warmup_target={float(start)!r}, warmup_steps={warm}"
        start = rising.numbers["start"]
    return f"CosineDecay({float(start)!r}, {n['steps']!r}, alpha={n['end'] / n['start']!r}{warmed})"


def _changes(rates: Rates) -> Iterator[tuple[int, float]]:
    """Yields for a schedule of constants how many updates are done when each begins, and its rate; from 0 on."""
    ends = [piece.begins for piece in rates.pieces[1:]]
    last: float | None = None
    for rate_piece, end in zip(rates.pieces, [*ends, math.inf], strict=True):
        inner = [rate_piece.origin + at for at in rate_piece.numbers.get("at", ())]
        for at in sorted({rate_piece.begins, *(at for at in inner if rate_piece.begins < at < end)}):
            if (rate := rate_piece.rate(at)) != last:
                yield at, rate
            last = rate


def mxnet_lines(rates: Rates) -> list[str]:
    """Returns the lines that make `schedule`, of MXNet, which is asked for the number of an update, from 1 on.

    Source: apache/mxnet python/mxnet/lr_scheduler.py.
    """
    call = _mxnet_own(rates.pieces)
    if call is not None:
        return [f"schedule = mx.lr_scheduler.{call}"]
    code = expression(rates, PYTHON)
    return [
        *(["import math"] if MATH in code else []),
        "# save_states pickles the name of this class: a program that loads them has it, where it is here, before",
        "class Schedule(mx.lr_scheduler.LRScheduler):",
        "    def __call__(self, num_update):",
        "        step = num_update - 1  # the updates done: MXNet counts the one that is made",
        f"        return {code}",
        "schedule = Schedule()",
    ]


def _mxnet_own(pieces: tuple[Piece, ...]) -> str | None:
    """Returns the call of MXNet's own class that is exactly a schedule of one piece; None if none is."""
    (rate_piece,) = pieces if len(pieces) == 1 else (None,)
    if rate_piece is None or rate_piece.origin != 0:
        return None
    n = rate_piece.numbers
    if rate_piece.kind == "step" and type(n["every"]) is int and n["every"] > 0 and 0 < n["factor"] <= 1:
        floor = f"stop_factor_lr={n.get('floor', 0)!r}"
        return f"FactorScheduler({n['every']!r}, {n['factor']!r}, {floor}, base_lr={n['start']!r})"
    rising = all(at < other for at, other in zip([0, *n.get("at", ())], n.get("at", ()), strict=False))
    if rate_piece.kind == "multistep" and "floor" not in n and rising and n["factor"] <= 1:
        return f"MultiFactorScheduler({list(n['at'])!r}, {n['factor']!r}, base_lr={n['start']!r})"
    return None
