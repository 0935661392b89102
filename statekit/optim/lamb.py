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
from dataclasses import dataclass, replace
from typing import Any

from statekit.arrays.backend import Backend, Value
from statekit.optim.adam_moments import CORRECTION, FIRST, RATE, SECOND, decay, slots_like
from statekit.optim.gradient_clipping import CLIP, Limits
from statekit.optim.steps import Arrays, Scene, Slots
from statekit.optim.trust_ratio import NORM, RATIO
from statekit.state.hyperparameters import (
    EXCLUDED,
    Exclusion,
    form,
    require_float32,
    require_slots,
    require_whole_updates,
    settled,
)
from statekit.state.train_state import Group, Rule, TrainState

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


def settle(group: Group, path: str, rule: Rule | None, variant: str) -> Hyperparameters:
    """Returns what a parameter's update needs: the weight decay is None where it is kept from the parameter."""
    hyper = hyperparameters(group, variant)
    excluded = EXCLUDED[form("lamb", variant)["decay_exclusions"]](path, hyper.exclude_from_weight_decay)
    rate = None if excluded else hyper.weight_decay_rate or None
    return replace(hyper, weight_decay_rate=rate, exclude_from_weight_decay=None)


def init(xp: Backend, param: Value, own: Hyperparameters, variant: str) -> dict[str, Value]:
    """Returns the slots of a parameter before its first update: zeros."""
    return slots_like(xp, param, dict.fromkeys(slot_names(own), xp.dtype(param)))


def begin(xp: Backend, params: Arrays, group: Group, variant: str) -> dict[str, Value]:
    """Returns no slots: a group as a whole has none."""
    return {}


def prepare(
    scene: Scene, group: Group, params: Arrays, grads: Arrays, slots: Slots, shared: Arrays
) -> tuple[Arrays, Arrays, None]:
    """Returns the gradients in the compute dtype, clipped by what limits those of a group together."""
    wide = {path: scene.xp.widen(grad) for path, grad in grads.items()}
    limits = settled(Limits, "lamb", scene.variant, group)
    return CLIP[form("lamb", scene.variant)["gradient_clipping"]](scene.xp, wide, limits), shared, None


def update(
    scene: Scene, param: Value, grad: Value, slots: Arrays, own: Hyperparameters, common: None
) -> tuple[Value, dict[str, Value]]:
    """Returns a parameter and its slots after one update, as `statekit.optim.steps.Steps.update`."""
    constants = form("lamb", scene.variant)
    rate = RATE[constants["lr_precision"]](scene.xp, scene.rate)
    s = Setting(scene.xp, constants, own, rate, scene.step)
    xp, hyper = s.xp, s.hyper
    p, blend = xp.widen(param), s.form["moment_update"]
    w = None if hyper.weight_decay_rate is None else xp.constant(hyper.weight_decay_rate)
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
    settled(Limits, "lamb", str(state.optimizer.variant), group)
    require_whole_updates(hyper.gradient_accumulation_steps)
