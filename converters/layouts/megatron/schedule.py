"""The schedule that Megatron-LM looks for when it loads a run: `opt_param_scheduler` in common.pt.

It gives every group's rate and weight decay anew at each update, and counts samples, not updates. How many an update
has is in no other system's state: the user says it, as global_batch_size. A constant rate doesn't depend on it.
Source: NVIDIA/Megatron-LM megatron/training/checkpointing.py, `load_checkpoint`;
megatron/core/optimizer_param_scheduler.py, `OptimizerParamScheduler`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statekit.lines.rates import RatesOf
from statekit.state.evidence import BATCH
from statekit.state.rates import Piece, Rates

_ENDLESS = 10**12
"""Updates until a rate that falls for ever is the lowest, as Megatron's falls to an end."""
KEY = "opt_param_scheduler"
"""Where common.pt has it."""


def written_schedule(
    groups: Sequence[Mapping[str, Any]], rates: RatesOf, updates: int
) -> tuple[dict[str, Any], str]:
    """Returns the state of the run's schedule, empty without one, and a note on it."""
    decays = _distinct(group.get("weight_decay") for group in groups if group.get("wd_mult", 1.0)) or [0.0]
    schedule = own_schedule(rates) if rates.schedules else _constant(_distinct(g.get("lr") for g in groups))
    why = schedule if isinstance(schedule, str) else _why_uncounted(rates, updates)
    if len(decays) > 1 or not all(type(decay) in (int, float) for decay in decays):
        why = "groups have weight decays of their own, or one is unknown"
    if not why and not isinstance(schedule, str):
        batch = batch_of(rates.state)
        record = _in_samples(schedule, decays[0], batch or 1, updates)
        return record, _said(schedule, decays[0], batch, updates)
    return {}, (
        f"Megatron-LM looks for a schedule, {KEY}, and finds none, as {why}: go on with Megatron-Core's own calls."
    )


def _why_uncounted(rates: RatesOf, updates: int) -> str:
    """Returns why a schedule can't be counted in samples; "" where it can, or counts nothing."""
    if rates.schedules and batch_of(rates.state) is None:
        return f"nothing says how many samples an update has (--hparams {BATCH}=N says it)"
    if rates.schedules and rates.done != updates:
        return f"the schedule stands at {rates.done} after {updates} updates"
    return ""


def _constant(rates: Sequence[Any]) -> dict[str, Any] | str:
    """Returns the schedule of a run that has none, or why it can't be one of Megatron."""
    if len(rates) > 1 or type(rates[0]) not in (int, float):
        return "groups have rates of their own, or one is a tensor or unknown"
    return _arguments({"start": 0.0, "steps": 0}, rates[0], rates[0], 1, "constant")


def _in_samples(schedule: Mapping[str, Any], decay: float, batch: int, updates: int) -> dict[str, Any]:
    """Returns a schedule of updates as Megatron's record, which counts samples: so many for each update."""
    rates = {key: schedule[key] for key in ("max_lr", "min_lr", "lr_decay_style")}
    steps = {key: schedule[key] * batch for key in ("lr_warmup_steps", "lr_decay_steps")}
    decays = {"start_wd": decay, "end_wd": decay, "wd_incr_steps": 1, "wd_incr_style": "constant"}
    return {**rates, **steps, **decays, "num_steps": updates * batch}


def _said(schedule: Mapping[str, Any], decay: float, batch: int | None, updates: int) -> str:
    """Returns what to say of a schedule that is written."""
    style = schedule["lr_decay_style"]
    if style == "constant" and batch is None:
        return (
            f"Megatron-LM looks for a schedule: it got the constant rate {schedule['max_lr']} and weight decay {decay}."
            f" Where it stands, {updates}, is updates; Megatron-LM counts samples, which a schedule that isn't constant"
            " needs."
        )
    flags = f"; it needs {' '.join(needed)}" if (needed := needed_flags(schedule, updates)) else ""
    is_endless = style == "constant" or schedule["lr_decay_steps"] == _ENDLESS
    stays = (
        ""
        if is_endless
        else f"; from {schedule['lr_decay_steps']} updates on it stays at {schedule['min_lr']!r}"
    )
    return f"Megatron-LM's schedule is the run's, {style}, in samples, {batch} an update{stays}{flags}."


def needed_flags(schedule: Mapping[str, Any], updates: int) -> list[str]:
    """Returns the options of Megatron-LM that say what the state of its schedule has no place for.

    Source: NVIDIA/Megatron-LM megatron/training/training.py, `get_optimizer_param_scheduler`.
    """
    is_warming = schedule["init_lr"] and updates < schedule["lr_warmup_steps"]
    warming = [f"--lr-warmup-init {schedule['init_lr']!r}"] if is_warming else []
    if schedule["lr_decay_style"] != "WSD":
        return warming
    steps, style = schedule["wsd_decay_steps"], schedule["lr_wsd_decay_style"]
    return [*warming, f"--lr-wsd-decay-iters {steps}", f"--lr-wsd-decay-style {style}"]


def batch_of(state: Mapping[str, Any]) -> int | None:
    """Returns how many samples an update has, as the user said it; None where nobody did."""
    facts = (fact for group in state["groups"] for fact in group.get("facts", ()) if fact["name"] == BATCH)
    return next((fact["value"] for fact in facts if type(fact["value"]) is int), None)


def own_schedule(rates: RatesOf) -> dict[str, Any] | str:
    """Returns the arguments of Megatron's scheduler that counts updates, or why it can't be the run's schedule.

    Its state dict holds none of those that `needed_flags` returns.
    """
    numbers = [number for number, group in enumerate(rates.state["groups"]) if group["paths"]]
    of_groups = [rates.of(number) for number in numbers]
    kinds = " and ".join(schedule.kind or "of an unknown kind" for schedule in rates.schedules)
    first = of_groups[0] if of_groups else ""
    if not isinstance(first, Rates) or of_groups.count(first) < len(of_groups):
        return f"the run's, {kinds}, isn't the same for all groups, or no file has it"
    schedule = _of_pieces(first.pieces)
    if schedule is None:
        return f"the run's, {kinds}, isn't one of Megatron-LM's"
    ends = schedule["lr_decay_steps"]
    if rates.done > ends and schedule["lr_decay_style"] != "constant":
        return f"the run is past the end of its schedule, {ends} updates, where Megatron's stays at one rate"
    return schedule


def _of_pieces(pieces: Sequence[Piece]) -> dict[str, Any] | None:
    """Returns the arguments of Megatron's scheduler for a warmup and one of its styles; None for another schedule."""
    is_warmed = pieces[0].kind == "linear" and 0 <= pieces[0].numbers["start"] < pieces[0].numbers["end"]
    if (is_warmed and pieces[0].origin) or any(map(_is_odd, pieces)):
        return None
    warmup = dict(pieces[0].numbers) if is_warmed else {"start": 0.0, "steps": 0}
    rest = list(pieces[1:] if is_warmed else pieces)
    peak = warmup["end"] if is_warmed else rest[0].numbers.get("start", rest[0].numbers.get("rate"))
    if not rest or (len(rest) == 1 and rest[0].kind == "constant"):
        same = not rest or rest[0].numbers["rate"] == peak
        return _arguments(warmup, peak, peak, round(warmup["steps"]) + 1, "constant") if same else None
    return _of_root(warmup, peak, rest) if rest[0].kind == "rsqrt" else _of_decay(warmup, peak, rest)


def _is_odd(part: Piece) -> bool:
    """Tells whether a piece ends within an update, or never falls as far as it would."""
    numbers = part.numbers
    lowest = min(numbers.get("start", math.inf), numbers.get("end", math.inf))
    is_cut: bool = part.kind != "rsqrt" and (numbers.get("floor") or 0.0) > lowest
    return is_cut or numbers.get("steps", 0) != round(numbers.get("steps", 0))


def _of_decay(warmup: Mapping[str, Any], peak: float, rest: Sequence[Piece]) -> dict[str, Any] | None:
    """Returns the arguments for a rate that falls from the end of a warmup on, or first stays."""
    is_stable = rest[0].kind == "constant" and rest[0].numbers["rate"] == peak
    decay, *after = rest[1:] if is_stable else rest
    if decay.kind not in ("cosine", "linear") or decay.numbers["start"] != peak:
        return None
    low, steps = decay.numbers["end"], round(decay.numbers["steps"])
    ends = decay.origin + steps
    stays = all(last.numbers.get("rate") == low and ends <= last.begins <= ends + 1 for last in after)
    if (
        not stays
        or decay.begins != decay.origin
        or not 0 <= low <= peak
        or (decay.origin != round(warmup["steps"]) and not is_stable)
    ):
        return None
    stable = {"wsd_decay_steps": steps, "lr_wsd_decay_style": decay.kind} if is_stable else {}
    style = "WSD" if is_stable else decay.kind
    return {**_arguments(warmup, peak, low, ends, style), **stable}


def _of_root(warmup: Mapping[str, Any], peak: float, rest: Sequence[Piece]) -> dict[str, Any] | None:
    """Returns the arguments for a rate that falls with the root of the updates, from the end of a warmup on."""
    root, *after = rest
    steps, shift = round(warmup["steps"]), root.numbers["shift"]
    of_updates = root.origin == shift and steps > 0
    if not of_updates or not math.isclose(root.numbers["start"] ** 2 * shift, peak**2 * steps, rel_tol=1e-12):
        return None
    low = root.numbers.get("floor") or 0.0
    if any(last.kind != "constant" or last.numbers["rate"] != low for last in after):
        return None
    ends = after[0].begins - 1 if after else _ENDLESS
    return _arguments(warmup, peak, low, ends, "inverse-square-root")


def _arguments(warmup: Mapping[str, Any], peak: float, low: float, ends: int, style: str) -> dict[str, Any]:
    return {
        "init_lr": warmup["start"], "max_lr": peak, "min_lr": low, "lr_warmup_steps": round(warmup["steps"]),
        "lr_decay_steps": ends, "lr_decay_style": style,
    }  # fmt: skip


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({repr(value): value for value in values}.values())
