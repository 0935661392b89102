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


def follow_average(
    xp: Backend, param: Value, slots: Mapping[str, Value], hyper: Averaging, step: Value
) -> tuple[Value, dict[str, Value]]:
    """Returns a parameter and its slots with `average` moved on after an update.

        average = d average + (1 - d) p,  d = ema_momentum, and 0 at the first update

    Args:
        xp: The array namespace.
        param: The parameter after the update, or as it was where it had no gradient.
        slots: Its slots, those of the update moved on.
        hyper: What is to be averaged, and how.
        step: Updates done before this one.

    Source: keras-team/keras, keras/src/optimizers/base_optimizer.py, `_update_model_variables_moving_average`.
    """
    if not hyper.use_ema or hyper.ema_momentum is None:
        return param, dict(slots)
    kept = xp.where(step == 0, xp.widen(0.0), xp.widen(hyper.ema_momentum))
    average = kept * xp.widen(slots["average"]) + (1.0 - kept) * xp.widen(param)
    if hyper.ema_overwrite_frequency:
        replaced = xp.where((step + 1) % hyper.ema_overwrite_frequency == 0, average, xp.widen(param))
        param = xp.narrow(replaced, xp.dtype(param))
    return param, {**slots, "average": xp.narrow(average, xp.dtype(slots["average"]))}
