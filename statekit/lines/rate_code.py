"""A run's learning rate as code: as Optax' own schedules, or as a function of the updates done in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from statekit.state.rates import Piece, Rates

MATH = "math."
"""What stands in code that needs `import math`."""
JAX_NUMPY = "jax.numpy."
"""What stands in code that needs `import jax`."""


def optax_code(rates: Rates) -> str:
    """Returns an expression for a schedule of Optax; a name of Optax where it has the formula.

    Source: google-deepmind/optax optax/schedules/_schedule.py, `linear_schedule`, `polynomial_schedule`,
    `exponential_decay`, `piecewise_constant_schedule`; _join.py, `join_schedules`, which passes the count from a
    boundary on.
    """
    parts = [_optax(piece, piece.begins) for piece in rates.pieces]
    if len(parts) == 1:
        return parts[0]
    bounds = [piece.begins for piece in rates.pieces[1:]]
    return f"optax.join_schedules([{', '.join(parts)}], {bounds!r})"


def _optax(rate_piece: Piece, begins: int) -> str:
    """Returns the schedule that a piece is, asked for the updates done after a number of them."""
    if rate_piece.origin == begins and (rate_piece.numbers.get("floor") is None or _takes_floor(rate_piece)):
        named = _optax_named(rate_piece)
        if named is not None:
            return named
    return f"lambda count: {_optax_value(rate_piece, begins)}"


def _takes_floor(rate_piece: Piece) -> bool:
    """Tells whether Optax' own function of a piece takes its floor: to a rate that doesn't fall it is the most."""
    return rate_piece.kind in ("exponential", "step") and 0 < rate_piece.numbers["factor"] < 1


def _optax_value(rate_piece: Piece, begins: int) -> str:
    """Returns the rate that a piece is, of `count`, the updates done after a number of them."""
    n, shift = rate_piece.numbers, begins - rate_piece.origin
    count = f"count + {shift}" if shift else "count"
    if rate_piece.kind == "product":
        code = " * ".join(f"({_optax_value(part, begins)})" for part in n["of"])
    elif (named := _optax_named(rate_piece)) is not None:
        code = f"{named}({count})"
    else:
        code = _formula(rate_piece, f"({count})" if shift else count, _JAX)
    if n.get("floor") is None or _takes_floor(rate_piece):
        return code
    return f"{JAX_NUMPY}maximum({code}, {n['floor']!r})"


def _optax_named(rate_piece: Piece) -> str | None:
    """Returns Optax' own function of a piece, of its own count; None if it has none."""
    n = rate_piece.numbers
    match rate_piece.kind:
        case "constant":
            return f"optax.constant_schedule({n['rate']!r})"
        case "linear":
            return f"optax.linear_schedule({n['start']!r}, {n['end']!r}, {n['steps']!r})"
        case "polynomial":
            return f"optax.polynomial_schedule({n['start']!r}, {n['end']!r}, {n['power']!r}, {n['steps']!r})"
        case "exponential" | "step" if not n["factor"]:  # which Optax takes for a rate that stays
            scales = {n["every"] if rate_piece.kind == "step" else 1: 0.0}
            return f"optax.piecewise_constant_schedule({n['start']!r}, {scales!r})"
        case "exponential" | "step":
            stairs = ", staircase=True" if rate_piece.kind == "step" else ""
            floor = f", end_value={n['floor']!r}" if n.get("floor") and _takes_floor(rate_piece) else ""
            return f"optax.exponential_decay({n['start']!r}, {n['every']!r}, {n['factor']!r}{stairs}{floor})"
        case "multistep":
            scales = {at: n["factor"] ** count for at, count in Counter(n["at"]).items()}
            return f"optax.piecewise_constant_schedule({n['start']!r}, {scales!r})"
    return None


def python_code(rates: Rates, over: float = 1.0) -> str:
    """Returns a function of the updates done: the learning rate, divided by a base.

    Args:
        rates: The schedule.
        over: The base, as `torch.optim.lr_scheduler.LambdaLR` multiplies it again.
    """
    code = expression(rates, PYTHON)
    return f"lambda step: {code}" if over == 1.0 else f"lambda step: ({code}) / {over!r}"


@dataclass(frozen=True)
class Dialect:
    """How the operations are written that a schedule's formulas are made of.

    Attributes:
        function: `cos` and `sqrt`, with `{name}` and `{of}`.
        least: The smaller of two, `{a}` and `{b}`.
        most: The larger of two.
        truth: A comparison as a number, `{a}`.
        choice: One rate where a condition holds, else the other: `{if_}`, `{then}`, `{other}`.
    """

    function: str
    least: str
    most: str
    truth: str
    choice: str


PYTHON = Dialect(
    f"{MATH}{{name}}({{of}})", "min({a}, {b})", "max({a}, {b})", "{a}", "{then} if {if_} else {other}"
)
_JAX = replace(PYTHON, function=f"{JAX_NUMPY}{{name}}({{of}})")
"""Only for what Optax has no name of: formulas that take neither the smaller nor the larger."""
KERAS = Dialect(
    "keras.ops.{name}({of})",
    "keras.ops.minimum({a}, {b})",
    "keras.ops.maximum({a}, {b})",
    'keras.ops.cast({a}, "float32")',
    "keras.ops.where({if_}, {then}, {other})",
)


def expression(rates: Rates, dialect: Dialect) -> str:
    """Returns the learning rate as an expression of `step`, the updates done."""
    code = _value(rates.pieces[-1], dialect)
    for rate_piece, following in reversed(list(zip(rates.pieces, rates.pieces[1:], strict=False))):
        then = _value(rate_piece, dialect)
        code = dialect.choice.format(if_=f"step < {following.begins}", then=then, other=code)
    return code


def _value(rate_piece: Piece, dialect: Dialect) -> str:
    n, origin = rate_piece.numbers, rate_piece.origin
    step = "step" if not origin else f"(step {'-' if origin > 0 else '+'} {abs(origin)})"
    if rate_piece.kind == "product":
        code = " * ".join(f"({_value(part, dialect)})" for part in n["of"])
    else:
        code = _formula(rate_piece, step, dialect)
    return code if n.get("floor") is None else dialect.most.format(a=code, b=repr(n["floor"]))


def _formula(rate_piece: Piece, step: str, dialect: Dialect) -> str:
    """Returns a piece's formula without its floor."""
    n = rate_piece.numbers
    match rate_piece.kind:
        case "constant":
            return f"{n['rate']!r}"
        case "linear":
            part = dialect.least.format(a=f"{step} / {n['steps']!r}", b="1")
            return f"{n['start']!r} + {n['end'] - n['start']!r} * {part}"
        case "polynomial":
            part = dialect.least.format(a=f"{step} / {n['steps']!r}", b="1")
            return f"{n['end']!r} + {n['start'] - n['end']!r} * (1 - {part}) ** {n['power']!r}"
        case "exponential":
            return f"{n['start']!r} * {n['factor']!r} ** ({step} / {n['every']!r})"
        case "step":
            return f"{n['start']!r} * {n['factor']!r} ** ({dialect.most.format(a=step, b='0')} // {n['every']!r})"
        case "multistep":
            past = dialect.truth.format(a=f"{step} >= at")
            return f"{n['start']!r} * {n['factor']!r} ** sum({past} for at in {list(n['at'])!r})"
        case "cosine" | "restarts":
            part = step if rate_piece.kind == "cosine" else f"({step} % {n['steps']!r})"
            turn = dialect.function.format(name="cos", of=f"{math.pi!r} * {part} / {n['steps']!r}")
            return f"{n['end']!r} + {n['start'] - n['end']!r} * (1 + {turn}) / 2"
        case "rsqrt":
            root = dialect.function.format(name="sqrt", of=f"1 + {step} / {n['shift']!r}")
            return f"{n['start']!r} / {root}"
        case "inverse":
            part = f"({step} {'//' if n['stairs'] else '/'} {n['every']!r})"
            return f"{n['start']!r} / (1 + {n['factor']!r} * {part})"
        case "eden":
            count = step if n["every"] == 1 else f"({step} // {n['every']!r})"
            return f"{n['start']!r} * (1 + ({count} / {n['scale']!r}) ** 2) ** -{n['power']!r}"
        case "product":
            raise AssertionError("a product is the code of its factors")
