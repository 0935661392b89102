"""Schedules that somebody tells by the call that makes them: a run's gin file, or the user.

A call stands in a state's extra as plain data: `function`, its name without modules; `arguments`, by name, or by
their number where they were told by their place, an inner call as such a record again; and `whole`, whether it gets
no others, so that the function's own defaults stand for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statekit.state.rates import Rates, Told, joined
from statekit.state.schedules import icefall, keras, optax, pytorch, t5x
from statekit.state.schedules.function import Function, is_count

KEY = "schedule"
"""Where the call stands in the extra."""


def called_rates(call: Any, base: float | None = None) -> Told:
    """Returns what a call comes to, or what is wrong with it or unknown, by its name.

    Args:
        call: Its record.
        base: The learning rate that a group of parameters begins with; None if it is unknown.
    """
    record = call if isinstance(call, Mapping) else {}
    name, arguments = record.get("function"), record.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return f"{call!r:.80} is no call of a schedule"
    function = FUNCTIONS.get(name)
    if function is None:
        return f"{name} isn't a schedule that is known here; these are: {', '.join(FUNCTIONS)}"
    by_name = named_arguments(function, arguments)
    if isinstance(by_name, str):
        return f"{name} {by_name}"
    whole = function.defaults if record.get("whole") else {}
    rates = function.read({**whole, **by_name}, base)
    if isinstance(rates, Rates):
        return rates
    return f"{name}: {rates}{'' if record.get('whole') else '; --schedule tells it'}"


def named_arguments(function: Function, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
    """Returns arguments by their names, without those that say nothing of the rate, or what is wrong with them."""
    by_number = {str(i): name for i, name in enumerate(function.parameters)}
    named = [(by_number.get(str(key), str(key)), value) for key, value in arguments.items()]
    if unknown := [name for name, _ in named if name not in function.parameters]:
        return f"has no argument {', '.join(unknown)} that is known here"
    if len({name for name, _ in named}) < len(named):
        return "gets an argument twice"
    return {name: value for name, value in named if name not in function.beside}


def _join(arguments: Mapping[str, Any], base: float | None) -> Told:
    """Returns schedules of Optax one after the other. Source: google-deepmind/optax optax/schedules/_join.py."""
    parts, bounds = arguments.get("schedules"), arguments.get("boundaries")
    if not isinstance(parts, list) or not isinstance(bounds, list) or len(parts) != len(bounds) + 1:
        return "schedules and boundaries don't go together"
    if not all(map(is_count, bounds)) or sorted(bounds) != bounds:
        return f"boundaries are {bounds!r:.80}"
    joined_rates: list[Rates] = []
    for part in parts:
        rates = called_rates(part, base)
        if isinstance(rates, str):
            return rates
        joined_rates.append(rates)
    return joined(joined_rates, bounds)


FUNCTIONS: Mapping[str, Function] = {
    **t5x.FUNCTIONS,
    **optax.FUNCTIONS,
    "join_schedules": Function(("schedules", "boundaries"), _join),
    **pytorch.FUNCTIONS,
    **keras.FUNCTIONS,
    **icefall.FUNCTIONS,
}
"""By the name without modules, what makes a schedule."""
