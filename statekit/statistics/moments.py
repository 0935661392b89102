"""The second moment of one parameter as its rule uses it, and the update that it makes of a gradient; in float64.

Everything is as the last update left it: corrections are those of the update that made these slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.arrays.numpy_backend import NumpyBackend
from statekit.errors import UnknownRuleError
from statekit.optim import adafactor, adafactor_forms, adam_family, adamw, lans, scaled_adam
from statekit.optim.scaled_adam_forms import corrected_updates
from statekit.state.constants import variant_constants
from statekit.state.train_state import Axis, Group, Rule
from statekit.tensors.tensor import Array


@dataclass(frozen=True)
class Moments:
    """One parameter's moments.

    Attributes:
        second: What its rule takes the root of: the corrected second moment.
        formula: How that comes about.
        divisor: What a gradient is divided by, in all: with it, an update without momentum is `rate * g / divisor`.
        divisor_formula: How that comes about.
        first: The corrected first moment, of gradients; None where the rule keeps none of these.
        corrections: 1 - beta^t of each moment, by the name of its slot.
        floor: The second moment of an element whose gradient was never anything but zero, at most.
        direction: The direction whose norm a trust ratio divides by; None where the rule has none.
        direction_formula: How it comes about.
        bounds: What the norm of the parameter is kept between in that ratio.
    """

    second: Array
    formula: str
    divisor: Array
    divisor_formula: str
    floor: float
    first: Array | None = None
    corrections: Mapping[str, float] | None = None
    direction: Array | None = None
    direction_formula: str = ""
    bounds: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class ParameterStep:
    """One parameter with all that its rule depends on; arrays are float64.

    Attributes:
        path: The parameter.
        group: Its group.
        rule: How it is factored.
        variant: Whose rule it is.
        dtype: The parameter's dtype.
        param: Its values, or its master's.
        slots: Its slots.
        updates: Updates done.
        rate: The learning rate; None: the rule has one by itself.
    """

    path: str
    group: Group
    rule: Rule | None
    variant: str
    dtype: str
    param: Array
    slots: Mapping[str, Array]
    updates: int
    rate: float | None


def moments(schema: str, place: ParameterStep) -> Moments | None:
    """Returns a parameter's moments; None where it has no second moment.

    Raises:
        UnknownRuleError: A hyperparameter or a factor rule that they depend on is unknown.
        StateError: statekit doesn't step this variant.
    """
    if not place.slots or not place.updates:
        return None
    return _OF[schema](place) if schema in _OF else None


def _correction(beta: float, updates: int) -> float:
    return 1.0 - float(beta) ** updates


def _adam(
    schema: adam_family.Schema, kind: type[adam_family.AdamHyperparameters], place: ParameterStep
) -> Moments | None:
    if not {"m", "v"} <= place.slots.keys():
        return None
    hyper = adam_family.settle(schema, kind, place.group, place.path, place.variant)
    form = variant_constants(schema, place.variant)
    c1, c2 = _correction(hyper.beta1, place.updates), _correction(hyper.beta2, place.updates)
    corrects = form["bias_correction"] != "none"
    name, v = ("v_max", place.slots["v_max"]) if "v_max" in place.slots else ("v", place.slots["v"])
    if name == "v_max" and form.get("amsgrad_of") == "corrected":
        second, formula = v, "v̂ = v_max, which holds corrected moments"
    elif corrects:
        second, formula = v / c2, f"v̂ = {name} / (1 - beta2^t), t = {place.updates}"
    else:
        second, formula = v, f"v̂ = {name}, which this variant doesn't correct"
    first = place.slots["m"] / c1 if corrects else place.slots["m"]
    epsilon = hyper.epsilon
    if form["epsilon_place"] == "beside_uncorrected_root" and corrects:
        divisor = (np.sqrt(v) + epsilon) / math.sqrt(c2)
        text = "D = (sqrt(v) + epsilon) / sqrt(1 - beta2^t)"
    else:
        divisor = np.sqrt(second + hyper.epsilon_root) + epsilon
        text = "D = sqrt(v̂ + epsilon_root) + epsilon" if hyper.epsilon_root else "D = sqrt(v̂) + epsilon"
    direction, equation = None, ""
    if schema == "lamb":
        direction, equation = first / divisor, "x = m̂ / D"
        if hyper.weight_decay_rate is not None and form.get("weight_decay_place") == "in_direction":
            direction = direction + hyper.weight_decay_rate * place.param
            equation = "x = m̂ / D + weight_decay p"
    corrections = {"m": c1, "v": c2} if corrects else None
    return Moments(second, formula, divisor, text, epsilon**2, first, corrections, direction, equation)


def _adamw(place: ParameterStep) -> Moments | None:
    return _adam("adamw", adamw.AdamWHyperparameters, place)


def _lamb(place: ParameterStep) -> Moments | None:
    return _adam("lamb", adam_family.AdamHyperparameters, place)


def _lans(place: ParameterStep) -> Moments | None:
    if not {"m", "v"} <= place.slots.keys():
        return None
    config = lans.settle(place.group, place.path, place.rule, place.variant)
    hyper, t = config.hyper, place.updates + config.hyper.begin_num_update
    c1, c2 = (_correction(b, t) if hyper.bias_correction else 1.0 for b in (hyper.beta1, hyper.beta2))
    second, first = place.slots["v"] / c2, place.slots["m"] / c1
    divisor = np.sqrt(second) + hyper.epsilon
    direction = first / divisor + config.wd * place.param
    corrected = (
        f"v̂ = v / (1 - beta2^t), t = {t}" if hyper.bias_correction else "v̂ = v, uncorrected by an option"
    )
    return Moments(
        second,
        f"{corrected}; of gradients over their norm" if hyper.normalize_grad else corrected,
        divisor,
        "D = sqrt(v̂) + epsilon",
        hyper.epsilon**2,
        first,
        {"m": c1, "v": c2} if hyper.bias_correction else None,
        direction,
        "a = m̂ / D + wd p",
        (hyper.lower_bound, hyper.upper_bound),
    )


def _adafactor(place: ParameterStep) -> Moments | None:
    if not ({"v_row", "v_col"} <= place.slots.keys() or "v" in place.slots):
        return None
    constants = variant_constants("adafactor", place.variant)
    rule = adafactor.check_rule(place.rule, place.path, place.param.ndim)
    config = adafactor.settle(place.group, place.path, rule, place.variant)
    s = adafactor_forms.Setting(NumpyBackend(), constants, config.hyper, config.rule, place.dtype, "compiled")
    clamps = s.form["epsilon1_place"] == "clamp"
    if config.rule.factored:
        rows, columns = config.rule.dims(Axis.ROW), config.rule.dims(Axis.COLUMN)
        v_row, v_col = place.slots["v_row"], place.slots["v_col"]
        left = tuple(row - sum(column < row for column in columns) for row in rows)
        mean = np.mean(v_row, axis=left, keepdims=True)
        text = "v̂ = v_row v_col / mean(v_row)"
        if s.form["normaliser"] == "clamped_mean":
            mean, text = np.maximum(mean, s.epsilon1), "v̂ = v_row v_col / max(mean(v_row), epsilon1)"
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.expand_dims(v_row / mean, columns)
        second = ratio * np.expand_dims(v_col, rows)
    else:
        second, text = place.slots["v"], "v̂ = v"
    used, formula = second, "D = sqrt(v̂) / scale"
    if clamps:
        used, formula = np.maximum(second, s.epsilon1**2), "D = max(sqrt(v̂), epsilon1) / scale"
    scale = adafactor_forms.parameter_scale(s, np.asarray(place.param, np.float32))
    if scale is None:
        formula = formula.replace(" / scale", "")
    else:
        formula += ", scale = max(rms(p), epsilon2)"
        if config.hyper.max_parameter_scale is not None:
            formula += ", at most max_parameter_scale"
    divisor = np.sqrt(used) / (1.0 if scale is None else np.asarray(scale, np.float64))
    floor = s.epsilon1**2 if clamps else 2 * s.epsilon1
    return Moments(second, text, divisor, formula, floor)


def _scaled_adam(place: ParameterStep) -> Moments | None:
    if "exp_avg_sq" not in place.slots:
        return None
    hyper = scaled_adam.settle(place.group, place.path, place.rule, place.variant)
    form = variant_constants("scaled_adam", place.variant)
    v = place.slots["exp_avg_sq"]
    beta2 = hyper.betas[1]
    is_scalar = place.param.size == 1
    c2 = _correction(beta2, place.updates)
    corrects = place.updates - 1 < corrected_updates(beta2) or (
        is_scalar and form["scalar_bias_correction"] == "always"
    )
    second = v / c2 if corrects else v
    if corrects:
        text = f"v̂ = exp_avg_sq / (1 - beta2^k), k = {place.updates}"
    else:
        text = "v̂ = exp_avg_sq, as 1 - beta2^k ≥ 0.99"
    root = np.sqrt(second) + hyper.eps
    if is_scalar:
        divisor, formula = root / hyper.scalar_lr_scale, "D = (sqrt(v̂) + eps) / scalar_lr_scale"
    else:
        size = max(float(np.max(place.slots["param_rms"])), hyper.param_min_rms)
        divisor, formula = root / size, "D = (sqrt(v̂) + eps) / max(param_rms, param_min_rms)"
    return Moments(
        second, text, divisor, formula, hyper.eps**2, None, {"exp_avg_sq": c2} if corrects else None
    )


_OF: Mapping[str, Callable[[ParameterStep], Moments | None]] = {
    "adafactor": _adafactor,
    "adamw": _adamw,
    "lamb": _lamb,
    "lans": _lans,
    "scaled_adam": _scaled_adam,
}


def own_rate(schema: str, place: ParameterStep) -> float | None:
    """Returns the learning rate of the next update: what the state says, as far as the rule doesn't change it."""
    if schema != "adafactor":
        return place.rate
    constants = variant_constants("adafactor", place.variant)
    config = adafactor.settle(place.group, place.path, place.rule, place.variant)
    s = adafactor_forms.Setting(NumpyBackend(), constants, config.hyper, config.rule, place.dtype, "compiled")
    given: Any = None if place.rate is None else np.float32(place.rate)
    try:
        return float(adafactor_forms.LEARNING_RATE[s.form["lr_source"]](s, given, place.updates))
    except UnknownRuleError:
        return None
