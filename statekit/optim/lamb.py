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

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from statekit.arrays.backend import Backend, Value
from statekit.optim import adam_family
from statekit.optim.adam_family import AdamHyperparameters, AdamSetting
from statekit.optim.adam_moments import FIRST, decay, second_moment, slots_like
from statekit.optim.gradient_clipping import clipped
from statekit.optim.steps import Arrays, Scene, Slots, no_group_slots, promoting, stored, sum_of
from statekit.state.constants import LambConstants, variant_constants
from statekit.state.train_state import Group, Rule, TrainState

Setting: TypeAlias = AdamSetting[LambConstants, AdamHyperparameters]


def settle(group: Group, path: str, rule: Rule | None, variant: str) -> AdamHyperparameters:
    """Returns the configuration of a parameter's update; its weight decay is None if the parameter is excluded."""
    return adam_family.settle("lamb", AdamHyperparameters, group, path, variant)


def init(xp: Backend, param: Value, config: AdamHyperparameters, variant: str) -> dict[str, Value]:
    """Returns the slots of a parameter before its first update: zeros."""
    return slots_like(xp, param, dict.fromkeys(slot_names(config), xp.dtype(param)))


begin = no_group_slots


def prepare(
    scene: Scene, group: Group, params: Arrays, grads: Arrays, slots: Slots, shared: Arrays
) -> tuple[Arrays, Arrays, None]:
    """Returns the gradients, clipped by what limits those of a group together."""
    return clipped("lamb", scene, group, grads), shared, None


def update(
    scene: Scene, param: Value, grad: Value, slots: Arrays, config: AdamHyperparameters, common: None
) -> tuple[Value, dict[str, Value]]:
    """Returns a parameter and its slots after one update, as `statekit.optim.steps.Steps.update`."""
    constants = variant_constants("lamb", scene.variant, scene.execution)
    squares, grad = getattr(grad, "squares", None), sum_of(grad)
    scene = promoting(scene, constants["compute_dtype"], [param, grad, *slots.values()])
    s: Setting = AdamSetting.of(scene, constants, config)
    xp, hyper = s.xp, s.hyper
    p, grad, blend = xp.widen(param), xp.widen(grad), s.form["moment_update"]
    w = None if hyper.weight_decay_rate is None else xp.constant(hyper.weight_decay_rate)
    if w is not None and s.form["weight_decay_place"] == "first":
        p = p - p * w * s.rate
    m = FIRST[blend](xp, xp.widen(slots["m"]), grad, decay(xp, hyper.beta1))
    v = second_moment(xp, blend, xp.widen(slots["v"]), grad, squares, decay(xp, hyper.beta2))
    root = xp.sqrt(s.corrected(v, s.corrections[1]) + xp.constant(hyper.epsilon_root))
    x = s.corrected(m, s.corrections[0]) / (root + xp.constant(hyper.epsilon))
    if w is not None and s.form["weight_decay_place"] == "in_direction":
        x = x + w * p
    norm = NORM["tree"]
    ratio = RATIO[s.form["trust_ratio_fallback"]](xp, norm(xp, p), norm(xp, x), 1.0)
    rate_first = s.form["step_product"] == "rate_first"
    p = p - (ratio * s.rate * x if rate_first else xp.cast(s.rate, xp.dtype(x)) * (x * ratio))
    return xp.narrow(p, xp.dtype(param)), stored(xp, {"m": m, "v": v}, slots)


def slot_names(hyper: AdamHyperparameters) -> tuple[str, ...]:
    """Returns the slots that a parameter has."""
    return ("m", "v", "average") if hyper.use_ema else ("m", "v")


def check(state: TrainState, group: Group) -> None:
    """Raises UnknownRuleError where the step can't go on as the original would."""
    adam_family.check("lamb", AdamHyperparameters, slot_names, state, group)


def _plain(xp: Backend, value: Value) -> Value:
    return xp.sqrt(xp.sum(value * value))


NORM: Mapping[str, Callable[[Backend, Value], Value]] = {
    "float32_sequential": _plain,
    "tree": lambda xp, value: xp.euclidean(value),
    "unspecified": _plain,
    "scaled": lambda xp, value: xp.norm(value),
}
"""The square root of the sum of squares: overflow and underflow are part of the rule, the order of a sum isn't."""


def _unless_zero(xp: Backend, top: Value, bottom: Value, otherwise: Value) -> Value:
    # Where a norm isn't above 0 it is 0 or NaN: adding it to the fallback changes nothing or keeps the NaN.
    inner = xp.if_greater(bottom, 0.0, top / bottom, otherwise + bottom)
    return xp.if_greater(top, 0.0, inner, otherwise + top)


def _if_positive(xp: Backend, top: Value, bottom: Value, otherwise: Value) -> Value:
    return xp.if_greater(top, 0.0, xp.if_greater(bottom, 0.0, top / bottom, otherwise), otherwise)


def _if_finite(xp: Backend, top: Value, bottom: Value, otherwise: Value) -> Value:
    ratio = top / bottom
    return xp.if_greater(ratio, 0.0, xp.if_greater(-ratio, -math.inf, ratio, otherwise), otherwise)


RATIO: Mapping[str, Callable[[Backend, Value, Value, Value], Value]] = {
    "zero_norm": _unless_zero,
    "undefined": _unless_zero,
    "not_positive": _if_positive,
    "zero_or_nan": _if_finite,
}
"""top / bottom, or a fallback, by `trust_ratio_fallback`."""
