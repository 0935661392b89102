"""Megatron-LM's schedule, `OptimizerParamScheduler`, which counts samples: as many an update as its global batch has.

Input: its record in common.pt, the iterations of the run, and the program's arguments where they are stored. Output:
the rate as a function of the updates done, or why there is none.
Source: NVIDIA/Megatron-LM megatron/core/optimizer_param_scheduler.py, `get_lr`; megatron/training/training.py,
`get_optimizer_param_scheduler`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from statekit.state.rates import Piece, Rates, Told, piece
from statekit.state.schedules.function import says
from statekit.tensors.typed import Finite, Natural, fits

_STATE = {
    "max_lr": Finite,
    "min_lr": Finite,
    "lr_warmup_steps": Natural,
    "lr_decay_steps": Natural,
    "num_steps": Natural,
}
_STYLE, _BATCH = "lr_decay_style", "global_batch_size"


def megatron_rates(record: Mapping[str, Any], iterations: Any, arguments: Mapping[str, Any]) -> Told:
    """Returns what the schedule does, as a function of the updates done.

    Args:
        record: Its state.
        iterations: The updates done by the run; None where it is unknown.
        arguments: The program's; empty where no file has them.
    """
    if not says(record, _STATE):
        return "the state of Megatron-LM's schedule is not whole"
    batch = _batch(record["num_steps"], iterations, arguments)
    if isinstance(batch, str):
        return batch
    warmup, steps = record["lr_warmup_steps"], record["lr_decay_steps"]
    if warmup % batch or steps % batch or steps <= warmup:
        return "Megatron-LM's schedule counts samples, and its warmup or decay ends within an update"
    peak, low, begin = record["max_lr"], record["min_lr"], arguments.get("lr_warmup_init", 0.0)
    warmup, steps = warmup // batch, steps // batch
    style = str(record.get(_STYLE))
    if style == "inverse-square-root" and not warmup:
        pieces = _root_of_samples(peak, low, batch, steps)
    elif style == "WSD":
        pieces = _stable(arguments, peak, low, batch, warmup, steps)
    else:
        pieces = _behind_warmup(style, peak, low, warmup, steps)
    if pieces is None:
        return f"Megatron-LM's style {record.get(_STYLE)!r:.40} isn't one that others have"
    if warmup:
        pieces.insert(0, piece("linear", start=begin if fits(begin, Finite) else 0.0, end=peak, steps=warmup))
    return Rates(tuple(pieces))


def _batch(samples: int, iterations: Any, arguments: Mapping[str, Any]) -> int | str:
    """Returns how many samples an update has, or why nobody knows it."""
    stated = arguments.get(_BATCH)
    if arguments.get("rampup_batch_size"):
        return "Megatron-LM's schedule counts samples, and the run's batch grows (rampup_batch_size)"
    if not fits(iterations, Natural) or not iterations or not samples or samples % iterations:
        return "Megatron-LM's schedule counts samples, and nothing says how many an update has"
    batch: int = samples // iterations
    if stated not in (None, batch) and batch != 1:
        return f"Megatron-LM's schedule counts samples, {batch} an update so far, and {_BATCH} is {stated}"
    return batch


def _root_of_samples(peak: float, low: float, batch: int, steps: int) -> list[Piece] | None:
    """Returns the pieces of a rate that falls with the root of the samples, as it does without a warmup."""
    root = piece("rsqrt", 1, 1, start=peak / math.sqrt(batch), shift=1, floor=low)
    return [piece("constant", rate=peak), root, piece("constant", steps + 1, rate=low)]


def _stable(
    arguments: Mapping[str, Any], peak: float, low: float, batch: int, warmup: int, steps: int
) -> list[Piece] | None:
    """Returns the pieces of a rate that stays and then falls; None where no argument says how, or another way.

    Source: NVIDIA/Megatron-LM megatron/training/training.py, `get_optimizer_param_scheduler`.
    """
    length: Any = arguments.get("lr_wsd_decay_iters")
    style: Any = arguments.get("lr_wsd_decay_style")
    in_samples: Any = arguments.get("lr_wsd_decay_samples")
    if length is None and fits(in_samples, Natural) and in_samples % batch == 0:
        length = in_samples // batch
    if not fits(length, Natural) or not 0 < length <= steps - warmup or style not in ("linear", "cosine"):
        return None
    begins = steps - length
    falls = piece(style, begins, begins, start=peak, end=low, steps=length)
    return [piece("constant", warmup, rate=peak), falls, piece("constant", steps, rate=low)]


def _behind_warmup(style: str, peak: float, low: float, warmup: int, steps: int) -> list[Piece] | None:
    """Returns the pieces that follow the warmup; None for a style that no other system has."""
    if style == "constant":
        return [piece("constant", warmup, rate=peak)]
    if style == "linear":
        decay = piece("linear", warmup, warmup, start=peak, end=low, steps=steps - warmup)
        return [decay, piece("constant", steps, rate=low)]
    if style == "cosine":
        decay = piece("cosine", warmup, warmup, start=peak, end=low, steps=steps - warmup)
        return [decay, piece("constant", steps, rate=low)]
    if style == "inverse-square-root":
        decay = piece("rsqrt", warmup, warmup, start=peak, shift=max(warmup, 1), floor=low)
        return [decay, piece("constant", steps + 1, rate=low)]
    return None
