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
    parts = [_from(_optax(one), one.begins - one.origin) for one in rates.pieces]
    if len(parts) == 1:
        return parts[0]
    bounds = [one.begins for one in rates.pieces[1:]]
    return f"optax.join_schedules([{', '.join(parts)}], {bounds!r})"


def _from(code: str, shift: int) -> str:
    """Returns a schedule that is asked for a later count than it is given."""
    return code if not shift else f"lambda count: ({code})(count + {shift})"


def _optax(one: Piece) -> str:
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
            floor = f", end_value={n['floor']!r}" if n["floor"] else ""
            return f"optax.exponential_decay({n['start']!r}, {n['every']!r}, {n['factor']!r}{stairs}{floor})"
        case "multistep":
            scales = {at: n["factor"] ** count for at, count in Counter(n["at"]).items()}
            return f"optax.piecewise_constant_schedule({n['start']!r}, {scales!r})"
        case "cosine":
            turn = f"{JAX_NUMPY}cos({JAX_NUMPY}pi * count / {n['steps']!r})"
            return f"lambda count: {n['end']!r} + {n['start'] - n['end']!r} * (1 + {turn}) / 2"
        case "rsqrt":
            return (
                f"lambda count: {n['start']!r} / {JAX_NUMPY}sqrt((count + {n['shift']!r}) / {n['shift']!r})"
            )


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
    n = one.numbers
    step = "step" if not one.origin else f"(step {'-' if one.origin > 0 else '+'} {abs(one.origin)})"
    match one.kind:
        case "constant":
            return f"{n['rate']!r}"
        case "linear":
            return f"{n['start']!r} + {n['end'] - n['start']!r} * min({step} / {n['steps']!r}, 1)"
        case "polynomial":
            left = f"(1 - min({step} / {n['steps']!r}, 1)) ** {n['power']!r}"
            return f"{n['end']!r} + {n['start'] - n['end']!r} * {left}"
        case "exponential":
            return f"max({n['start']!r} * {n['factor']!r} ** ({step} / {n['every']!r}), {n['floor']!r})"
        case "step":
            count = f"(max({step}, 0) // {n['every']!r})"
            return f"max({n['start']!r} * {n['factor']!r} ** {count}, {n['floor']!r})"
        case "multistep":
            return f"{n['start']!r} * {n['factor']!r} ** sum({step} >= at for at in {_list(n['at'])})"
        case "cosine":
            turn = f"{MATH}cos({MATH}pi * {step} / {n['steps']!r})"
            return f"{n['end']!r} + {n['start'] - n['end']!r} * (1 + {turn}) / 2"
        case "rsqrt":
            return f"{n['start']!r} / {MATH}sqrt(({step} + {n['shift']!r}) / {n['shift']!r})"


def _list(numbers: Sequence[int]) -> str:
    return repr(list(numbers))
