"""The schedule that Megatron-LM looks for when it loads a run: `opt_param_scheduler` in common.pt.

It gives every group's rate and weight decay anew at each update, and counts samples, not updates: how many an update
had is in no other system's state. A constant rate doesn't depend on it, and can be written.
Source: NVIDIA/Megatron-LM megatron/training/checkpointing.py, `load_checkpoint`;
megatron/core/optimizer_param_scheduler.py, `OptimizerParamScheduler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statekit.state.run import Schedule

KEY = "opt_param_scheduler"
"""Where common.pt has it."""


def constant_schedule(
    groups: Sequence[Mapping[str, Any]], schedules: Sequence[Schedule], updates: int
) -> tuple[dict[str, Any], str]:
    """Returns the state of a schedule of one rate and one weight decay, empty if there is none, and what to say of it.

    Args:
        groups: The groups, as the file has them.
        schedules: The schedules of the run, as its source has them.
        updates: Updates done.
    """
    rates = _distinct(group.get("lr") for group in groups)
    decays = _distinct(group.get("weight_decay") for group in groups if group.get("wd_mult", 1.0)) or [0.0]
    if schedules:
        kinds = " and ".join(schedule.kind or "of an unknown kind" for schedule in schedules)
        why = f"the run's, {kinds}, isn't one of Megatron-LM's"
    elif not all(type(number) in (int, float) for number in (*rates, *decays)):
        why = "a rate or weight decay is a tensor, or unknown"
    elif len(rates) > 1 or len(decays) > 1:
        why = "groups have rates or weight decays of their own"
    else:
        (rate,), (decay,) = rates, decays
        state = {
            "max_lr": rate, "min_lr": rate, "lr_warmup_steps": 0, "lr_decay_steps": 1, "lr_decay_style": "constant",
            "start_wd": decay, "end_wd": decay, "wd_incr_steps": 1, "wd_incr_style": "constant", "num_steps": updates,
        }  # fmt: skip
        return state, (
            f"Megatron-LM looks for a schedule: it got the constant rate {rate} and weight decay {decay}. Where it "
            f"stands, {updates}, is updates; Megatron-LM counts samples, which a schedule that isn't constant needs."
        )
    return {}, (
        f"Megatron-LM looks for a schedule, {KEY}, and finds none, as {why}: go on with Megatron-Core's own calls."
    )


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({repr(value): value for value in values}.values())
