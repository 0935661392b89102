"""The schedule that a user gives for a run, checked against the run's files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from statekit.errors import UsageError
from statekit.state.options import stored_rate
from statekit.state.rates import Rates
from statekit.state.run import MEGATRON, Schedule, run_of
from statekit.state.schedules import icefall
from statekit.state.schedules.called import FUNCTIONS, KEY, called_rates, named_arguments
from statekit.state.train_state import TrainState


def told_schedule(state: TrainState, call: Mapping[str, Any]) -> TrainState:
    """Returns a state with the schedule that the user gives.

    What the run's files say of the same call stays where the user says nothing else.

    Args:
        state: The state.
        call: The call's record, as `schedules.called` has it.

    Raises:
        UsageError: Nothing is known of such a schedule, or something that it needs isn't, or the rates that the run's
            files hold aren't its.
    """
    before = state.extra.get(KEY)
    name, function = call.get("function"), FUNCTIONS.get(str(call.get("function")))
    if isinstance(before, Mapping) and function is not None and _same(name, before.get("function")):
        stated = {key: value for key, value in before["arguments"].items() if key in function.parameters}
        arguments = named_arguments(function, call["arguments"])
        call = {**call, "arguments": {**stated, **arguments}} if not isinstance(arguments, str) else call
    changed = replace(state, extra={**state.extra, KEY: dict(call)})
    schedule = run_of(changed.extra).schedules[0]
    rates_of_call = called_rates(call) if schedule.kind == MEGATRON else schedule.rates
    rates_told = [rates_of_call] if isinstance(rates_of_call, str) else [*schedule.rates]
    faults = [rates for rates in rates_told if isinstance(rates, str)]
    faults = faults or [*_against(changed, schedule)]
    if faults:
        raise UsageError(
            "The schedule that was told can't be the run's.",
            place="--schedule",
            expected=f"{name}({', '.join(function.parameters)})" if function else ", ".join(FUNCTIONS),
            found=faults[0],
        )
    return changed


def _same(name: Any, other: Any) -> bool:
    return name == other or {name, other} <= icefall.FUNCTIONS.keys()


def _against(state: TrainState, schedule: Schedule) -> Iterator[str]:
    """Yields what a run's file says against the schedule that it is told to have: the rates of its groups."""
    if schedule.at is None:
        return
    # icefall's is asked before an update, PyTorch's after it.
    updates = schedule.at - 1 if schedule.kind in icefall.FUNCTIONS else schedule.at
    for number, group in enumerate(state.optimizer.groups):
        if not schedule.moves(number):
            continue
        rates = schedule.of_group(number)
        stored = stored_rate(group.hyperparameters)
        if (
            isinstance(rates, Rates)
            and type(stored) is float
            and not math.isclose(rates.rate(updates), stored, rel_tol=1e-6)
        ):
            yield f"it gives {rates.rate(updates)!r} at {schedule.at}, and group {number} has {stored!r}"
