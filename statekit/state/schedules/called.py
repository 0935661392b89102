"""Schedules that somebody tells by the call that makes them: a run's gin file, or the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from statekit.state.rates import Told
from statekit.state.schedules.t5x import SCHEDULER, t5x_rates

READERS: Mapping[str, Callable[[Mapping[str, Any], bool], Told]] = {SCHEDULER: t5x_rates}
"""Function -> what its call comes to, of its arguments and whether they are all."""


def called_rates(function: str, arguments: Mapping[str, Any], whole: bool) -> Told:
    """Returns what a call comes to.

    Args:
        function: What is called.
        arguments: By name.
        whole: Whether these are all that it gets, so that its own defaults stand for the others.
    """
    reader = READERS.get(function)
    if reader is None:
        return f"{function} isn't a schedule that is known here: {', '.join(READERS)} are"
    return reader(arguments, whole)
