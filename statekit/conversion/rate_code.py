"""A run's learning rate as code: as Optax' own schedules, or as a function of the updates done in plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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
    parts = [_optax(one, one.begins) for one in rates.pieces]
    if len(parts) == 1:
        return parts[0]
    bounds = [one.begins for one in rates.pieces[1:]]
    return f"optax.join_schedules([{', '.join(parts)}], {bounds!r})"


def _optax(one: Piece, begins: int) -> str:
    """Returns the schedule that a piece is, asked for the updates done after a number of them."""
    if one.origin == begins and (one.numbers.get("floor") is None or one.kind in _FLOORED):
        named = _optax_named(one)
        if named is not None:
            return named
    return f"lambda count: {_optax_value(one, begins)}"


_FLOORED = ("exponential", "step")
"""The kinds of which Optax' own function takes a floor."""


def _optax_value(one: Piece, begins: int) -> str:
    """Returns the rate that a piece is, of `count`, the updates done after a number of them."""
    n, shift = one.numbers, begins - one.origin
    count = f"count + {shift}" if shift else "count"
    if one.kind == "product":
        code = " * ".join(f"({_optax_value(part, begins)})" for part in n["of"])
    elif (named := _optax_named(one)) is not None:
        code = f"{named}({count})"
    else:
        code = _formula(one, f"({count})" if shift else count, JAX_NUMPY)
    return (
        code
        if n.get("floor") is None or one.kind in _FLOORED
        else f"{JAX_NUMPY}maximum({code}, {n['floor']!r})"
    )


def _optax_named(one: Piece) -> str | None:
    """Returns Optax' own function of a piece, of its own count; None if it has none."""
    n = one.numbers
    match one.kind:
        case "constant":
            return f"optax.constant_schedule({n['rate']!r})"
        case "linear":
            return f"optax.linear_schedule({n['start']!r}, {n['end']!r}, {n['steps']!r})"
        case "polynomial":
            return f"optax.polynomial_schedule({n['start']!r}, {n['end']!r}, {n['power']!r}, {n['steps']!r})"
        case "exponential" | "step":
            stairs = ", staircase=True" if one.kind == "step" else ""
            floor = f", end_value={n['floor']!r}" if n.get("floor") else ""
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
    code = _python(rates.pieces[-1])
    for one, following in reversed(list(zip(rates.pieces, rates.pieces[1:], strict=False))):
        code = f"{_python(one)} if step < {following.begins} else {code}"
    return f"lambda step: {code}" if over == 1.0 else f"lambda step: ({code}) / {over!r}"


def _python(one: Piece) -> str:
    n, origin = one.numbers, one.origin
    step = "step" if not origin else f"(step {'-' if origin > 0 else '+'} {abs(origin)})"
    parts = (
        [f"({_python(part)})" for part in n["of"]] if one.kind == "product" else [_formula(one, step, MATH)]
    )
    code = " * ".join(parts)
    return code if n.get("floor") is None else f"max({code}, {n['floor']!r})"


def _formula(one: Piece, step: str, functions: str) -> str:
    """Returns a piece's formula without its floor.

    Args:
        one: The piece.
        step: Code for its own count.
        functions: Whose `cos` and `sqrt` it takes.
    """
    n = one.numbers
    match one.kind:
        case "constant":
            return f"{n['rate']!r}"
        case "linear":
            return f"{n['start']!r} + {n['end'] - n['start']!r} * min({step} / {n['steps']!r}, 1)"
        case "polynomial":
            left = f"(1 - min({step} / {n['steps']!r}, 1)) ** {n['power']!r}"
            return f"{n['end']!r} + {n['start'] - n['end']!r} * {left}"
        case "exponential":
            return f"{n['start']!r} * {n['factor']!r} ** ({step} / {n['every']!r})"
        case "step":
            return f"{n['start']!r} * {n['factor']!r} ** (max({step}, 0) // {n['every']!r})"
        case "multistep":
            return f"{n['start']!r} * {n['factor']!r} ** sum({step} >= at for at in {_list(n['at'])})"
        case "cosine" | "restarts":
            part = step if one.kind == "cosine" else f"({step} % {n['steps']!r})"
            turn = f"{functions}cos({functions}pi * {part} / {n['steps']!r})"
            return f"{n['end']!r} + {n['start'] - n['end']!r} * (1 + {turn}) / 2"
        case "rsqrt":
            return f"{n['start']!r} / {functions}sqrt(1 + {step} / {n['shift']!r})"
        case "eden":
            count = step if n["every"] == 1 else f"({step} // {n['every']!r})"
            return f"{n['start']!r} * (1 + ({count} / {n['scale']!r}) ** 2) ** -{n['power']!r}"
        case "product":
            raise AssertionError("a product is the code of its factors")


def _list(numbers: Sequence[int]) -> str:
    return repr(list(numbers))
