"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235), as T5X runs it.

One parameter p with gradient g and learning rate a, at count s (updates done before this one):

    t = s - step_offset + 1,  d = 1 - t^-decay_rate
    scale = a * min(max(rms_A(p), epsilon2), max_parameter_scale)      (or a, without parameter scale)
    q = g^2 + epsilon1
    v_row = d v_row + (1-d) mean_COLUMN(q),  v_col = d v_col + (1-d) mean_ROW(q)
    y = g (v_row / mean_ROW(v_row))^-1/2 v_col^-1/2                    (or v = d v + (1-d) q, y = g v^-1/2)
    u = scale * y / max(1, rms_A(y) / clipping_threshold)
    m = beta1 m + (1-beta1) u,  u = m                                  (with momentum)
    p = (1 - w) p - u,  w = weight_decay_rate [* a^weight_decay_rate_lr_exponent]

A is every axis that isn't BATCH. Where other implementations differ, from the place of epsilon on,
`schemas/adafactor.json` names the form that each has, and statekit.optim.adafactor_forms does it.

Source: google-research/t5x, t5x/adafactor.py, `Adafactor.apply_param_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from statekit.arrays.backend import Backend, Value
from statekit.arrays.promotion import LOW
from statekit.errors import UnknownRuleError
from statekit.optim import adafactor_forms as forms
from statekit.optim.adafactor_forms import STORAGE, AdafactorHyperparameters, Setting
from statekit.optim.gradient_clipping import clipped
from statekit.optim.steps import (
    Arrays,
    Scene,
    Slots,
    no_group_slots,
    promoting,
    rounds_added,
    rounds_of,
    stored,
    sum_of,
)
from statekit.state.constants import Rounds, variant_constants
from statekit.state.hyperparameters import IS_EXCLUDED, settled
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, Group, Rule, TrainState
from statekit.tensors.tensor import Shape

REPRODUCED = ("float32", "each_operation", "promoted")
"""Values of `compute_dtype` whose rounding of low-precision parameters the step makes."""
COMPOUNDING = "given_or_relative_compounding"
"""The value of `lr_source` with which a parameter finds the effective rate of the one before it."""


@dataclass(frozen=True)
class ParamConfig:
    """All that one parameter's update depends on beside arrays and scene."""

    hyper: AdafactorHyperparameters
    rule: Rule
    place: int | None = None
    """Where it stands in its group, if its learning rate depends on those before it."""


def hyperparameters(group: Group, path: str, variant: str = "t5x") -> AdafactorHyperparameters:
    """Returns what a parameter's update needs from its group.

    Raises:
        UnknownRuleError: A hyperparameter that the variant offers is unknown; lists all that are.
    """
    hyper = settled(AdafactorHyperparameters, "adafactor", variant, group)
    scale = hyper.multiply_by_parameter_scale
    excluded = group.hyperparameters.get("exclude_from_parameter_scale") or ()
    return replace(
        hyper,
        multiply_by_parameter_scale=(scale[path] if isinstance(scale, Mapping) else scale)
        and not any(part in path for part in excluded),
        own_rate_scaled=scale is not False,
        weight_decay_rate=None if _undecayed(path, hyper, variant) else hyper.weight_decay_rate,
        exclude_from_weight_decay=None,
    )


def _undecayed(path: str, hyper: AdafactorHyperparameters, variant: str) -> bool:
    excluded = IS_EXCLUDED[variant_constants("adafactor", variant)["decay_exclusions"]]
    return excluded(path, hyper.exclude_from_weight_decay)


def defaults(variant: str = "t5x") -> dict[str, Any]:
    """Returns a variant's defaults for the hyperparameters it offers, from the schema."""
    return dict(load_schema("adafactor").variant(variant)["defaults"])


def check_rule(rule: Rule | None, path: str, rank: int) -> Rule:
    """Returns a rule that a step may use.

    Raises:
        UnknownRuleError: There is none, or it is assumed and the rank leaves it open.
    """
    if rule is None or (rule.known_from == "assumed" and rank > 2):
        raise UnknownRuleError(
            "The step needs to know how a parameter is factored, and the slots' shapes leave it open.",
            place=path,
            expected="ROW, COLUMN, BATCH or NONE for each axis",
            found=None if rule is None else f"assumed: {', '.join(axis.value for axis in rule.axes)}",
            remedy="give factor_map, or logical_factor_rules with logical_axes, as the run's gin file had them",
        )
    return rule


def slot_shapes(rule: Rule, shape: Shape, momentum: bool) -> dict[str, Shape]:
    """Returns the shapes of the slots that a parameter has."""
    second = (
        {name: rule.slot_shape(name, shape) for name in ("v_row", "v_col")} if rule.factored else {"v": shape}
    )
    return {**second, **({"m": shape} if momentum else {})}


def settle(group: Group, path: str, rule: Rule | None, variant: str) -> ParamConfig:
    """Returns what a parameter's update needs.

    Raises:
        UnknownRuleError: There is no rule, or a hyperparameter that the variant offers is unknown.
    """
    if rule is None:
        raise UnknownRuleError("The step needs to know how a parameter is factored.", place=path)
    compounds = variant_constants("adafactor", variant)["lr_source"] == COMPOUNDING
    return ParamConfig(
        hyperparameters(group, path, variant), rule, group.paths.index(path) if compounds else None
    )


def init(xp: Backend, param: Value, config: ParamConfig, variant: str) -> dict[str, Value]:
    """Returns the slots of a parameter before its first update: zeros, in the dtypes that the variant gives them."""
    s = Setting(
        xp, variant_constants("adafactor", variant), config.hyper, config.rule, xp.dtype(param), "compiled"
    )
    dtypes = {"m": s.momentum_dtype, "average": s.dtype}
    shapes = slot_shapes(config.rule, xp.shape(param), s.momentum)
    if config.hyper.use_ema:
        shapes["average"] = xp.shape(param)
    return {
        name: xp.zeros(param, shape, dtypes.get(name, s.second_moment_dtype))
        for name, shape in shapes.items()
    }


begin = no_group_slots


def prepare(
    scene: Scene, group: Group, params: Arrays, grads: Arrays, slots: Slots, shared: Arrays
) -> tuple[Arrays, Arrays, tuple[Value, ...] | None]:
    """Returns the gradients, clipped by what limits those of a group together, and the rates that `update` takes."""
    constants = variant_constants("adafactor", scene.variant)
    limited = CLIPPED[constants["gradient_clipping"]](scene, group, grads)
    compounds = constants["lr_source"] == COMPOUNDING
    return limited, shared, compounded(scene, group, params, grads) if compounds else None


def compounded(scene: Scene, group: Group, params: Arrays, grads: Arrays) -> tuple[Value, ...] | None:
    """Returns the rate that each of a group's parameters finds, in order; None where the optimizer has its own.

    The effective rate of a parameter, its scale included, is written back to the group: the next one's given rate.

    Source: facebookresearch/fairseq, fairseq/optim/adafactor.py, `Adafactor.step`, `_get_lr`.
    """
    if scene.rate is None:
        return None
    xp, rates = scene.xp, [scene.xp.widen(scene.rate)]
    for path in group.paths:
        if path not in grads:
            rates.append(rates[-1])
            continue
        p, hyper = params[path], hyperparameters(group, path, scene.variant)
        whole = Rule((Axis.NONE,) * len(xp.shape(p)), "given")
        s = _setting(scene, hyper, whole, p)
        scale = forms.parameter_scale(s, xp.widen(p))
        rates.append(rates[-1] if scale is None else rates[-1] * _plain(xp, scale))
    return tuple(rates[:-1])


def _setting(scene: Scene, hyper: AdafactorHyperparameters, rule: Rule, param: Value) -> Setting:
    constants = variant_constants("adafactor", scene.variant, scene.execution)
    rounds = rounds_of(scene, constants["compute_dtype"])
    return Setting(scene.xp, constants, hyper, rule, scene.xp.dtype(param), rounds, rounds_added(scene))


def _plain(xp: Backend, scale: Value) -> Value:
    """Returns a value of one element as a 0-d array."""
    return xp.mean(scale, tuple(range(len(xp.shape(scale)))))


def update(
    scene: Scene,
    param: Value,
    grad: Value,
    slots: Arrays,
    config: ParamConfig,
    common: tuple[Value, ...] | None,
) -> tuple[Value, dict[str, Value]]:
    """Returns the parameter and its slots after one update, as `statekit.optim.steps.Steps.update`.

    The learning rate is used as float32, before parameter scale.

    Source: `schemas/adafactor.json`, `steps` and each variant's `sources`.
    """
    constants = variant_constants("adafactor", scene.variant, scene.execution)
    squares, grad = getattr(grad, "squares", None), sum_of(grad)
    scene = promoting(scene, constants["compute_dtype"], [param, grad, *slots.values()], LOW)
    s = _setting(scene, config.hyper, config.rule, param)
    xp, step, hyper = s.xp, scene.step, s.hyper
    storage = STORAGE[s.form["parameter_storage"]]
    old, g = storage.decode(s, param), xp.widen(grad)
    if hyper.maximize:
        g = -g
    decay, mix = forms.DECAY[hyper.decay_type](s, step)
    raw_rate = scene.rate if common is None or config.place is None else common[config.place]
    given = None if raw_rate is None else xp.literal(raw_rate)
    rate = forms.LEARNING_RATE[s.form["lr_source"]](s, given, step)
    place = s.form["weight_decay_place"]
    early = forms.weight_decay(s, given, rate) if place in ("first", "after_scale") else None
    base = forms.DECAYED[s.form["weight_decay_expression"]](s, old, early) if early is not None else old
    scale = forms.parameter_scale(s, base if place == "first" else old)
    step_size = rate if scale is None else rate * scale
    if s.form["xla_perturbation"]:
        tiny = xp.mean(g * g + xp.constant(s.epsilon1), tuple(range(len(xp.shape(g))))) * xp.constant(1e-30)
        decay, mix, step_size = decay + tiny, 1.0 - (decay + tiny), step_size + tiny
    new, y, measured = _second_moment(s, g, squares, slots, decay, mix)
    size = step_size
    if hyper.clipping_threshold is not None:
        rms = forms.root_mean_square(s, measured, s.form["clipping_over"])
        factor = forms.at_least(s, rms / xp.constant(hyper.clipping_threshold), 1.0)
        size, y = forms.CLIP[s.form["clipping_applies_to"]](size, y, factor)
    u = forms.STEP_PRODUCT[s.form["step_product"]](s, size, y, rate, scale)
    if s.momentum:
        u = new["m"] = _momentum(s, u, slots["m"])
    late = forms.weight_decay(s, given, step_size) if place == "last" else None
    after = forms.applied(s, base, u, size, y, late)
    slots_after = stored(xp, new, slots)
    param_after = storage.encode(s, after, step)
    if hyper.skip_nan_updates:
        slots_after = {name: xp.keep_nan(value, slots[name]) for name, value in slots_after.items()}
        param_after = xp.keep_nan(param_after, param)
    return param_after, slots_after


def clip_by_global_norm(
    xp: Backend, grads: Arrays, threshold: float | None, execution: Rounds = "compiled"
) -> dict[str, Value]:
    """Scales all gradients by threshold * min(1/threshold, 1/norm); does nothing for None or 0.

    The sum runs over the leaves in the order of JAX's tree, dicts by sorted keys.
    Source: T5X t5x/adafactor.py, `Adafactor.apply_gradient`, `global_norm_clip_threshold`.
    """
    if not threshold or not grads:
        return dict(grads)
    squares: list[Value] = []
    for path in sorted(grads, key=lambda p: p.split("/")):
        g = xp.widen(grads[path])
        dtype = xp.dtype(grads[path])
        square = g * g if execution == "compiled" else xp.rounded(g * g, dtype)
        squares.append(xp.rounded(xp.sum(square), dtype))
    total = squares[0]
    for square in squares[1:]:
        total = xp.rounded(total + square, dtype)
    inverse = xp.rounded(1.0 / xp.rounded(xp.sqrt(total), dtype), dtype)
    factor = xp.rounded(
        xp.minimum(inverse, xp.constant(1.0 / threshold, dtype)) * xp.constant(threshold, dtype), dtype
    )
    return {path: xp.narrow(xp.widen(g) * factor, xp.dtype(g)) for path, g in grads.items()}


def _own_norm(scene: Scene, group: Group, grads: Arrays) -> Arrays:
    threshold = group.hyperparameters.get("global_norm_clip_threshold")
    return clip_by_global_norm(scene.xp, grads, threshold, rounds_of(scene, "float32"))


def _limited(scene: Scene, group: Group, grads: Arrays) -> Arrays:
    return clipped("adafactor", scene, group, grads)


CLIPPED: Mapping[str, Callable[[Scene, Group, Arrays], Arrays]] = {
    "none": lambda scene, group, grads: grads,
    "global_norm": _own_norm,
    "base_class": _limited,
    "chain": _limited,
}
"""Gradients after clipping, by `gradient_clipping`."""


def _second_moment(
    s: Setting, g: Value, squares: Value | None, slots: Arrays, decay: Value, mix: Value
) -> tuple[dict[str, Value], Value, Value]:
    """Returns the new second moment, the gradient divided by its root, and what clipping measures of that.

    Where parts of the gradient are squared by themselves, it measures the root of their sum of squares instead.
    """
    xp, rule = s.xp, s.rule
    q = forms.SQUARE[s.form["epsilon1_place"]](s, g * g if squares is None else squares)
    blend, scaled = forms.BLEND[s.form["second_moment_update"]], s.form["precondition_form"]
    if not rule.factored:
        v = xp.cast(blend(s, xp.widen(slots["v"]), q, decay, mix), xp.dtype(slots["v"]))
        new = {"v": v}

        def divided(value: Value) -> Value:
            return forms.UNFACTORED[scaled](s, value, v)
    else:
        mean_of = forms.MEAN[s.form["mean_form"]]
        rows, columns = rule.dims(Axis.ROW), rule.dims(Axis.COLUMN)
        v_row, v_col = (
            xp.cast(
                blend(s, xp.widen(slots[name]), mean_of(s, g, q, gone), decay, mix), xp.dtype(slots[name])
            )
            for name, gone in (("v_row", columns), ("v_col", rows))
        )
        left = tuple(row - sum(column < row for column in columns) for row in rows)
        mean = forms.NORMALISER[s.form["normaliser"]](s, xp.mean(v_row, left, keepdims=True))
        row, col = xp.expand(v_row, columns), xp.expand(v_col, rows)
        new = {"v_row": v_row, "v_col": v_col}

        def divided(value: Value) -> Value:
            return forms.FACTORED[scaled](s, value, row, col, xp.expand(mean, columns))

    y = divided(g)
    return new, y, y if squares is None else divided(xp.sqrt(squares))


def _momentum(s: Setting, u: Value, m: Value) -> Value:
    beta1 = s.hyper.beta1
    assert beta1 is not None
    rounded_to = "float32" if s.form["momentum_constant"] == "exact" else s.momentum_dtype
    kept = forms.MOMENTUM_PRODUCT[s.form["momentum_product"]](
        s, s.xp.widen(m) * s.xp.constant(beta1, rounded_to)
    )
    return kept + u * s.xp.constant(1.0 - beta1)


def check(state: TrainState, group: Group) -> None:
    """Raises UnknownRuleError if a rule or hyperparameter of a group is unknown."""
    variant = str(state.optimizer.variant)
    rounding = variant_constants("adafactor", variant)["compute_dtype"]
    for path in group.paths:
        dtype = state.params[path].dtype.name
        if dtype != "float32" and rounding not in REPRODUCED:
            raise UnknownRuleError(
                "This variant rounds every operation of low precision, and that isn't reproduced yet.",
                place=path,
                expected="float32",
                found=dtype,
            )
        check_rule(state.rules.get(path), path, len(state.params[path].shape))
        hyperparameters(group, path, variant)
