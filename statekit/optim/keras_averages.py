"""Averages of the parameters themselves, as Keras' base class keeps them beside any optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from statekit.backends import Backend, Value


class Averaging(Protocol):
    """What averaging needs to know."""

    @property
    def use_ema(self) -> bool:
        """Whether averages are kept."""

    @property
    def ema_momentum(self) -> float | None:
        """Their decay."""

    @property
    def ema_overwrite_frequency(self) -> int | None:
        """Updates after which they replace the parameters; None: never."""


def follow_averages(
    xp: Backend,
    params: Mapping[str, Value],
    slots: Mapping[str, Mapping[str, Value]],
    hyper: Averaging,
    step: Value,
) -> tuple[dict[str, Value], dict[str, dict[str, Value]]]:
    """Returns parameters and slots with every `average` moved on after an update.

        average = d average + (1 - d) p,  d = ema_momentum, and 0 at the first update

    Args:
        xp: The array namespace.
        params: Parameters after the update.
        slots: Their slots, those of the update moved on.
        hyper: What is to be averaged, and how.
        step: Updates done before this one.

    Source: keras-team/keras, keras/src/optimizers/base_optimizer.py, `_update_model_variables_moving_average`.
    """
    new_params, new_slots = dict(params), {path: dict(own) for path, own in slots.items()}
    if not hyper.use_ema or hyper.ema_momentum is None:
        return new_params, new_slots
    kept = xp.where(step == 0, xp.widen(0.0), xp.widen(hyper.ema_momentum))
    period = hyper.ema_overwrite_frequency
    for path, param in params.items():
        average = kept * xp.widen(slots[path]["average"]) + (1.0 - kept) * xp.widen(param)
        new_slots[path]["average"] = xp.narrow(average, xp.dtype(slots[path]["average"]))
        if period:
            replaced = xp.where((step + 1) % period == 0, average, xp.widen(param))
            new_params[path] = xp.narrow(replaced, xp.dtype(param))
    return new_params, new_slots
