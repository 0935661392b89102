"""AdamW (Kingma and Ba 2014, arXiv 1412.6980; Loshchilov and Hutter 2017, arXiv 1711.05101).

One parameter p with gradient g, learning rate a and weight decay w, at the t-th update:

    p = p (1 - a w)                                       (torch, Keras; elsewhere w p joins the direction)
    m = beta1 m + (1-beta1) g,  v = beta2 v + (1-beta2) g^2
    v_max = max(v_max, v), and v_max divides              (with amsgrad)
    D = sqrt(v / (1 - beta2^t)) + epsilon
    p = p - a (m / (1 - beta1^t)) / D

Mesh-TF and GPT-Neo leave both corrections out; Keras moves them into the learning rate, so that epsilon stands beside
the uncorrected root. Where implementations differ, `schemas/adamw.json` has the name of the form as a constant.

Source: pytorch/pytorch, torch/optim/adam.py, `_single_tensor_adam`; the other variants' `sources` in the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from statekit.arrays.backend import Backend, Value
from statekit.arrays.promotion import LOW
from statekit.errors import UnknownRuleError
from statekit.optim import adam_family
from statekit.optim.adam_family import AdamHyperparameters, AdamSetting, MomentSetting
from statekit.optim.adam_moments import FIRST, decay, second_moment, slots_like, weighted_product
from statekit.optim.gradient_clipping import clipped
from statekit.optim.steps import Arrays, Scene, Slots, no_group_slots, promoting, stored, sum_of
from statekit.state.constants import AdamWConstants, variant_constants
from statekit.state.stored_params import MASTER
from statekit.state.train_state import Group, Rule, TrainState


@dataclass(frozen=True)
class AdamWHyperparameters(AdamHyperparameters):
    """What a group's update needs, in canonical names. `schemas/adamw.json` explains each."""

    decoupled_weight_decay: bool
    amsgrad: bool
    nesterov: bool
    maximize: bool
    dtype_momentum: str | None


Setting: TypeAlias = AdamSetting[AdamWConstants, AdamWHyperparameters]


@dataclass(frozen=True)
class Moving:
    """One parameter in the middle of its update: p, g, new moments, v or what takes its place, weight decay or None."""

    p: Value
    g: Value
    m: Value
    v: Value
    decay: float | None


def _denominator(s: Setting, v: Value) -> Value:
    # PyTorch's CPU kernel rounds a number that it adds to the arrays' dtype, and keeps a factor or divisor float32.
    return s.returned(DENOMINATOR[s.form["denominator_form"]](s, v) + s.added(s.hyper.epsilon))


def _root_over_root(s: Setting, v: Value) -> Value:
    return s.returned(s.returned(s.xp.sqrt(v)) / s.xp.sqrt(s.corrections[1]))


def _root_of_quotient(s: Setting, v: Value) -> Value:
    is_corrected = s.hyper.amsgrad and s.form["amsgrad_of"] == "corrected"
    corrected = v if is_corrected else s.corrected(v, s.corrections[1])
    return s.returned(s.xp.sqrt(s.returned(corrected) + s.xp.constant(s.hyper.epsilon_root)))


DENOMINATOR: Mapping[str, Callable[[Setting, Value], Value]] = {
    "root_over_root": _root_over_root,
    "root_of_quotient": _root_of_quotient,
    "root": lambda s, v: s.returned(s.xp.sqrt(v)),
}


def _step_size(s: Setting, x: Moving) -> Value:
    return s.returned(x.p - ((s.rate / s.corrections[0]) * x.m) / _denominator(s, x.v))


def _step_in_denominator(s: Setting, x: Moving) -> Value:
    # The step size is a tensor, as the count is: it divides the denominator, in the loop before epsilon is added.
    step, root = s.rate / s.corrections[0], s.xp.sqrt(s.corrections[1])

    def inside() -> Value:
        quotient = s.returned(s.returned(s.xp.sqrt(x.v)) / (root * step))
        return s.returned(quotient + s.added(s.hyper.epsilon) / step)

    denominator = s.xp.either(lambda: s.returned(_denominator(s, x.v) / step), inside)
    return s.returned(x.p - x.m / denominator)


def _direction(s: Setting, x: Moving) -> Value:
    m = s.returned(s.corrected(x.m, s.corrections[0]))
    if s.hyper.nesterov:
        beta1 = s.hyper.beta1
        ahead, now = s.corrected(x.m, s.correction(beta1, 2)), s.corrected(x.g, s.corrections[0])
        m = s.xp.constant(beta1) * ahead + s.xp.constant(1.0 - beta1) * now
    direction = _decayed(s, x, s.returned(m / _denominator(s, x.v)))
    return s.stepped(x.p, s.xp.cast(s.rate, s.xp.dtype(direction)), direction)


def _reciprocal(s: Setting, x: Moving) -> Value:
    return x.p - s.rate * _decayed(s, x, x.m * (1.0 / _denominator(s, x.v)))


def _scaled_moment(s: Setting, x: Moving) -> Value:
    alpha = s.rate * s.xp.sqrt(s.corrections[1]) / s.corrections[0]
    return x.p - x.m * alpha / _denominator(s, x.v)


def _scaled_quotient(s: Setting, x: Moving) -> Value:
    alpha = s.rate * s.xp.sqrt(s.corrections[1]) / s.corrections[0]
    return s.stepped(x.p, alpha, s.returned(x.m / _denominator(s, x.v)))


def _decayed(s: Setting, x: Moving, direction: Value) -> Value:
    if x.decay is None or s.form["weight_decay_expression"] != "in_update":
        return direction
    return direction + s.xp.constant(x.decay) * x.p


UPDATE: Mapping[str, Callable[[Setting, Moving], Value]] = {
    "step_size": _step_size,
    "step_in_denominator": _step_in_denominator,
    "direction": _direction,
    "reciprocal": _reciprocal,
    "scaled_moment": _scaled_moment,
    "scaled_quotient": _scaled_quotient,
}
"""The parameter after an update."""


def _share(s: MomentSetting[Any, Any], p: Value, w: float) -> Value:
    # TensorFlow's graphs multiply the two numbers first, jitted or not.
    weight = s.xp.constant(w)
    return p * (s.rate * weight) if s.fused and s.dtype in LOW else p * weight * s.rate


DECAYED_FIRST: Mapping[str, Callable[[MomentSetting[Any, Any], Value, float], Value]] = {
    "product_first": lambda s, p, w: s.times(p, 1.0 - s.rate * w),
    "subtract_first": lambda s, p, w: p - _share(s, p, w),
    "in_update": lambda s, p, w: p,
}
"""The parameter before the update of the moments."""


def slot_names(hyper: AdamWHyperparameters) -> tuple[str, ...]:
    """Returns the slots that a parameter has."""
    return ("m", "v", *(["v_max"] if hyper.amsgrad else []), *(["average"] if hyper.use_ema else []))


def momentum_dtype(form: AdamWConstants, hyper: AdamWHyperparameters, param_dtype: str) -> str:
    """Returns the dtype in which m is stored."""
    named = {"parameter": param_dtype, "dtype_momentum": hyper.dtype_momentum or param_dtype}
    return named.get(form["first_moment_dtype"], "float32")


def settle(group: Group, path: str, rule: Rule | None, variant: str) -> AdamWHyperparameters:
    """Returns the configuration of a parameter's update; its weight decay is None if the parameter is excluded."""
    return adam_family.settle("adamw", AdamWHyperparameters, group, path, variant)


def init(xp: Backend, param: Value, config: AdamWHyperparameters, variant: str) -> dict[str, Value]:
    """Returns the slots of a parameter before its first update: zeros."""
    dtype, constants = xp.dtype(param), variant_constants("adamw", variant)
    second = dtype if constants["moment_dtype"] == "parameter" else "float32"
    first = momentum_dtype(constants, config, dtype)
    dtypes = {"m": first, "v": second, "v_max": second, "average": dtype}
    return slots_like(xp, param, {name: dtypes[name] for name in slot_names(config)})


begin = no_group_slots


def prepare(
    scene: Scene, group: Group, params: Arrays, grads: Arrays, slots: Slots, shared: Arrays
) -> tuple[Arrays, Arrays, None]:
    """Returns the gradients, clipped by what limits those of a group together."""
    return clipped("adamw", scene, group, grads), shared, None


def update(
    scene: Scene, param: Value, grad: Value, slots: Arrays, config: AdamWHyperparameters, common: None
) -> tuple[Value, dict[str, Value]]:
    """Returns a parameter and its slots after one update, as `statekit.optim.steps.Steps.update`.

    Where there is a master, it is what moves, and the parameter its rounding.
    """
    constants = variant_constants("adamw", scene.variant, scene.execution)
    moved = slots.get(MASTER, param)
    squares, grad = getattr(grad, "squares", None), sum_of(grad)
    if MASTER in slots:
        grad = scene.xp.widen(grad)
    scene = promoting(scene, constants["compute_dtype"], [moved, grad, *slots.values()])
    s: Setting = AdamSetting.of(scene, constants, config, scene.xp.dtype(moved))
    xp, hyper = s.xp, s.hyper
    p, g = xp.widen(moved), xp.widen(grad)
    if s.form["compute_dtype"] == "converted":
        g = xp.cast(g, s.dtype)
        if squares is not None and s.dtype in LOW:
            raise UnknownRuleError(
                "How the original rounds rows that are given several times isn't known beside low precision.",
                expected="a gradient of the parameter's shape",
                found=f"rows beside {s.dtype}",
            )
    if hyper.maximize:
        g = -g
    w = hyper.weight_decay_rate
    if w is not None:
        p = DECAYED_FIRST[s.form["weight_decay_expression"]](s, p, w)
    new = dict(zip(("m", "v"), _moments(s, slots, g, squares), strict=True))
    used = new["v"]
    if hyper.amsgrad:
        uncorrected = s.form["amsgrad_of"] == "uncorrected"
        used = xp.maximum(
            xp.widen(slots["v_max"]), used if uncorrected else s.corrected(used, s.corrections[1])
        )
        new["v_max"] = used
    p = UPDATE[s.form["update_form"]](s, Moving(p, g, new["m"], used, w))
    if MASTER in slots:
        new[MASTER] = p
    return xp.narrow(p, xp.dtype(param)), stored(xp, new, slots)


def _moments(s: Setting, slots: Arrays, g: Value, squares: Value | None) -> tuple[Value, Value]:
    xp, kind = s.xp, s.form["second_moment_update"]
    m = FIRST[s.form["first_moment_update"]](xp, xp.widen(slots["m"]), g, decay(xp, s.hyper.beta1))
    v, weights = xp.widen(slots["v"]), decay(xp, s.hyper.beta2)
    if kind == "weighted_product":
        return s.returned(m), s.returned(weighted_product(s.times(v, weights.old), g, weights))
    if kind == "lerp":
        return s.returned(m), s.returned(xp.lerp(v, s.returned(g * g), xp.widen(weights.new)))
    return s.returned(m), s.returned(second_moment(xp, kind, v, g, squares, weights))


def check(state: TrainState, group: Group) -> None:
    """Raises UnknownRuleError where the step can't go on as the original would."""
    hyper = adam_family.check("adamw", AdamWHyperparameters, slot_names, state, group, masters=True)
    if hyper.weight_decay_rate and not hyper.decoupled_weight_decay:
        raise UnknownRuleError(
            "Adam with weight decay in the gradient isn't AdamW; the step doesn't do it.",
            expected="decoupled_weight_decay true",
        )
