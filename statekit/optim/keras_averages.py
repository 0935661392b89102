"""Averages of the parameters themselves, as Keras' base class keeps them beside any optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from statekit.arrays.backend import Backend, Value
from statekit.state.train_state import Group


def follow_average(
    xp: Backend, param: Value, slots: Mapping[str, Value], group: Group, step: Value
) -> tuple[Value, dict[str, Value]]:
    """Returns a parameter and its slots with `average` moved on after an update.

        average = d average + (1 - d) p,  d = ema_momentum, and 0 at the first update

    Args:
        xp: The array namespace.
        param: The parameter after the update, or as it was where it had no gradient.
        slots: Its slots, those of the update moved on.
        group: Says `ema_momentum`, and after how many updates averages replace the parameters (None: never).
        step: Updates done before this one.

    Source: keras-team/keras, keras/src/optimizers/base_optimizer.py, `_update_model_variables_moving_average`.
    """
    period = group.hyperparameters.get("ema_overwrite_frequency")
    kept = xp.where(step == 0, xp.widen(0.0), xp.widen(group.hyperparameters["ema_momentum"]))
    average = kept * xp.widen(slots["average"]) + (1.0 - kept) * xp.widen(param)
    if period:
        replaced = xp.where((step + 1) % period == 0, average, xp.widen(param))
        param = xp.narrow(replaced, xp.dtype(param))
    return param, {**slots, "average": xp.narrow(average, xp.dtype(slots["average"]))}
