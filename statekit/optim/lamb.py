"""LAMB (You et al. 2019, arXiv 1904.00962).

One parameter p with gradient g, learning rate a and weight decay w, at the t-th update, norms over the tensor:

    m = beta1 m + (1-beta1) g,  v = beta2 v + (1-beta2) g^2
    x = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t) + epsilon_root) + epsilon) + w p
    p = p - a (||p|| / ||x||) x                                     (ratio 1 where a norm is 0)

Keras decays the parameter before everything else instead, p = p - w a p, outside the ratio. Where implementations
differ, `schemas/lamb.json` has the name of the form as a constant.

Source: google-deepmind/optax, optax/_src/alias.py, `lamb`; keras-team/keras, keras/src/optimizers/lamb.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from statekit.backends import Backend, Value
from statekit.optim.adafactor import Execution
from statekit.optim.adam_moments import CORRECTION, FIRST, RATE, SECOND, decay, slots_like
from statekit.optim.gradient_clipping import CLIP
from statekit.optim.keras_averages import follow_averages
from statekit.optim.settings import (
    EXCLUDED,
    Exclusion,
    form,
    require_float32,
    require_gradients,
    require_slots,
    require_whole_updates,
    settled,
)
from statekit.optim.trust_ratio import NORM, RATIO
from statekit.state import Group, Rule, TrainState

Slots: TypeAlias = Mapping[str, Value]
VARIANTS = ("optax", "keras")
"""The variants of the schema of which there are recordings."""


@dataclass(frozen=True)
class Hyperparameters:
    """What a group's update needs, in canonical names. `schemas/lamb.json` explains each."""

    beta1: float
    beta2: float
    epsilon: float
    epsilon_root: float
    weight_decay_rate: float | None
    exclude_from_weight_decay: Exclusion
    global_norm_clip_threshold: float | None
    clipnorm: float | None
    clipvalue: float | None
    loss_scale_factor: float | None
    use_ema: bool
    ema_momentum: float | None
    ema_overwrite_frequency: int | None
    gradient_accumulation_steps: int | None


@dataclass(frozen=True)
class Setting:
    """Where a group's update runs.

    Attributes:
        xp: The array namespace.
        form: The variant's constants: difference -> name of its form.
        hyper: Hyperparameters.
        rate: Learning rate, as the original holds it.
        step: Updates done so far (int, or 0-d integer array).
    """

    xp: Backend
    form: Mapping[str, Any]
    hyper: Hyperparameters
    rate: Value
    step: Value

    def correction(self, beta: float) -> Value:
        """Returns 1 - beta^t, t being this update's number."""
        return CORRECTION[self.form["bias_correction_precision"]](self.xp, beta, self.step + 1)


def update(
    s: Setting, param: Value, grad: Value, slots: Slots, decayed: bool
) -> tuple[Value, dict[str, Value]]:
    """Returns a parameter and its slots after one update.

    Args:
        s: Where the update runs.
        param: The parameter, float32.
        grad: Its gradient, same shape, in the compute dtype, clipped.
        slots: m and v before the update.
        decayed: Whether weight decay isn't kept from this parameter.
    """
    xp, hyper = s.xp, s.hyper
    p, blend = xp.widen(param), s.form["moment_update"]
    w = xp.constant(hyper.weight_decay_rate) if decayed and hyper.weight_decay_rate else None
    if w is not None and s.form["weight_decay_place"] == "first":
        p = p - p * w * s.rate
    m = FIRST[blend](xp, xp.widen(slots["m"]), grad, decay(xp, hyper.beta1))
    v = SECOND[blend](xp, xp.widen(slots["v"]), grad, decay(xp, hyper.beta2))
    root = xp.sqrt(v / s.correction(hyper.beta2) + xp.constant(hyper.epsilon_root))
    x = m / s.correction(hyper.beta1) / (root + xp.constant(hyper.epsilon))
    if w is not None and s.form["weight_decay_place"] == "in_direction":
        x = x + w * p
    norm = NORM["tree"]
    ratio = RATIO[s.form["trust_ratio_fallback"]](xp, norm(xp, p), norm(xp, x), 1.0)
    rate_first = s.form["step_product"] == "rate_first"
    p = p - (ratio * s.rate * x if rate_first else s.rate * (x * ratio))
    new = {"m": m, "v": v}
    return xp.narrow(p, xp.dtype(param)), {
        name: xp.narrow(value, xp.dtype(slots[name])) for name, value in new.items()
    }


def hyperparameters(group: Group, variant: str) -> Hyperparameters:
    """Returns what a group's update needs.

    Raises:
        UnknownRuleError: A hyperparameter that the variant offers is unknown; lists all that are.
    """
    return settled(Hyperparameters, "lamb", variant, group)


def slot_names(hyper: Hyperparameters) -> tuple[str, ...]:
    """Returns the slots that a parameter has."""
    return ("m", "v", "average") if hyper.use_ema else ("m", "v")


def check(state: TrainState, group: Group) -> None:
    """Raises UnknownRuleError where the step can't go on as the original would."""
    hyper = hyperparameters(group, str(state.optimizer.variant))
    for path in group.paths:
        require_float32(state, path)
        require_slots(state, path, slot_names(hyper))
    require_whole_updates(hyper.gradient_accumulation_steps)


def start(
    xp: Backend, params: Slots, rules: Mapping[str, Rule], group: Group, variant: str
) -> tuple[dict[str, dict[str, Value]], dict[str, Value]]:
    """Returns the slots of every parameter of a group before its first update: zeros."""
    names = slot_names(hyperparameters(group, variant))
    own = {path: dict.fromkeys(names, xp.dtype(params[path])) for path in group.paths}
    return {path: slots_like(xp, params[path], dtypes) for path, dtypes in own.items()}, {}


def move(
    xp: Backend,
    params: Slots,
    grads: Slots,
    slots: Mapping[str, Slots],
    shared: Slots,
    rules: Mapping[str, Rule],
    group: Group,
    variant: str,
    learning_rate: Value,
    step: Value,
    execution: Execution,
) -> tuple[dict[str, Value], dict[str, dict[str, Value]], Slots]:
    """Returns a group's parameters and slots after one update; the global norm is taken over the group."""
    hyper, constants = hyperparameters(group, variant), form("lamb", variant)
    require_gradients(group.paths, grads, constants["step_scope"])
    s = Setting(xp, constants, hyper, RATE[constants["lr_precision"]](xp, learning_rate), step)
    wide = {path: xp.widen(grad) for path, grad in grads.items()}
    new_params, new_slots = dict(params), {path: dict(own) for path, own in slots.items()}
    excluded = EXCLUDED[constants["decay_exclusions"]]
    for path, g in CLIP[constants["gradient_clipping"]](xp, wide, hyper).items():
        decayed = not excluded(path, hyper.exclude_from_weight_decay)
        new_params[path], moved = update(s, params[path], g, slots[path], decayed)
        new_slots[path].update(moved)
    return *follow_averages(xp, new_params, new_slots, hyper, step), shared
