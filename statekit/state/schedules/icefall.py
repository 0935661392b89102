"""icefall's schedules: Eden falls with the batches and with the epochs, Eden2 with the batches alone.

Their states are two counts; what else they need lies among the run's own settings, or nowhere. A batch is counted
before its update, so that the first update is asked for batch 1. Where an epoch has as many batches as the last,
the epochs are a function of the updates done too.

Source: k2-fsa/icefall egs/librispeech/ASR/zipformer/optim.py, `LRScheduler`, `Eden`, `Eden2`; zipformer/train.py,
`train_one_epoch`, at 36e0420c.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from statekit.state.rates import Rates, Told, piece, product
from statekit.state.schedules.function import Function, fault

_BATCHES, _EPOCHS, _WARM, _START = "lr_batches", "lr_epochs", "warmup_batches", "warmup_start"
_BASE, _LENGTH = "base_lr", "batches_per_epoch"
SETTINGS = (_BATCHES, _EPOCHS, _WARM, _START)
"""The arguments of their classes that say what they do."""
IN_RUN = (_BATCHES, _EPOCHS, _BASE)
"""What a run's own settings are called that train.py gives them."""


def _read(arguments: Mapping[str, Any], base: float | None, epochs: bool) -> Told:
    arguments = {**arguments, _BASE: arguments.get(_BASE) if base is None else base}
    counts = [_LENGTH] if epochs else []
    if why := fault(
        arguments, [_BASE, _BATCHES, *([_EPOCHS] if epochs else []), _WARM, _START, *counts], counts
    ):
        return why
    if not all(arguments[name] > 0 for name in (_BATCHES, *([_EPOCHS, _LENGTH] if epochs else []))):
        return f"{_BATCHES} and what else it divides by must be more than 0"
    power, warm, start = (0.25 if epochs else 0.5), arguments[_WARM], arguments[_START]
    factors = [
        Rates(
            (piece("eden", 0, -1, start=arguments[_BASE], scale=arguments[_BATCHES], power=power, every=1),)
        )
    ]
    if epochs:
        falling = piece("eden", start=1.0, scale=arguments[_EPOCHS], power=power, every=arguments[_LENGTH])
        factors.append(Rates((falling,)))
    if warm > 0:
        rising = piece("linear", 0, -1, start=start, end=1.0, steps=warm)
        factors.append(Rates((rising, piece("constant", max(math.ceil(warm) - 1, 0), rate=1.0))))
    return product(*factors)


def eden(base: float, arguments: Mapping[str, Any], batch: int, epoch: int) -> float:
    """Returns the rate of Eden after its warm-up."""
    by_batches = piece("eden", start=base, scale=arguments[_BATCHES], power=0.25, every=1)
    return by_batches.rate(batch) * piece(
        "eden", start=1.0, scale=arguments[_EPOCHS], power=0.25, every=1
    ).rate(epoch)


_BESIDE = ("optimizer", "verbose")
FUNCTIONS: dict[str, Function] = {
    "Eden": Function(
        ("optimizer", _BATCHES, _EPOCHS, _WARM, _START, "verbose", _BASE, _LENGTH),
        lambda said, base: _read(said, base, True),
        {_WARM: 500.0, _START: 0.5},
        _BESIDE,
    ),
    "Eden2": Function(
        ("optimizer", _BATCHES, _WARM, _START, "verbose", _BASE),
        lambda said, base: _read(said, base, False),
        {_WARM: 500.0, _START: 0.5},
        _BESIDE,
    ),
}
