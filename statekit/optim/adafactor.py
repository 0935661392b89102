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

A is every axis that isn't BATCH. Source: google-research/t5x, t5x/adafactor.py, `Adafactor.apply_param_gradient`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeAlias

from statekit.backends import Backend, Value
from statekit.errors import UnknownRuleError, UsageError
from statekit.optim import adafactor_forms as forms
from statekit.optim.adafactor_forms import Execution as Execution  # noqa: PLC0414  (part of this module's face)
from statekit.optim.adafactor_forms import Hyperparameters, Setting
from statekit.optim.adafactor_storage import STORAGE
from statekit.schema import load_schema
from statekit.state import Axis, Group, Rule, TrainState
from statekit.tensor import Shape

Slots: TypeAlias = Mapping[str, Value]

VARIANTS = ("t5x", "t2t_early", "t2t_late", "mesh_tf", "hf", "torch", "optax", "keras")
"""Every variant of the schema but fairseq, whose learning rate compounds over the parameters of a step."""


@cache
def _settings(variant: str) -> tuple[dict[str, Any], frozenset[str]]:
    """Returns what a variant has for every hyperparameter, and which of them somebody must say."""
    schema = load_schema("adafactor")
    return schema.settings(variant), frozenset(schema.variant(variant)["defaults"])


def hyperparameters(group: Group, path: str, variant: str = "t5x") -> Hyperparameters:
    """Returns what a parameter's update needs from its group.

    Raises:
        UnknownRuleError: A hyperparameter that the variant offers is unknown; lists all that are.
    """
    settled, offered = _settings(variant)
    needed = [field.name for field in fields(Hyperparameters) if field.name != "own_rate_scaled"]
    missing = [name for name in needed if name in offered and name not in group.hyperparameters]
    if missing:
        raise UnknownRuleError(
            "The step needs hyperparameters that the checkpoint doesn't say.",
            place=path,
            expected=", ".join(missing),
            remedy=f"give them: --hparams {missing[0]}=VALUE, or load_optimizer(..., {missing[0]}=VALUE)",
        )
    values = {**settled, **group.hyperparameters}
    scale = values["multiply_by_parameter_scale"]
    values["multiply_by_parameter_scale"] = scale[path] if isinstance(scale, Mapping) else scale
    return Hyperparameters(**{name: values[name] for name in needed}, own_rate_scaled=scale is not False)


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


def setting(
    xp: Backend,
    param: Value,
    rule: Rule,
    hyper: Hyperparameters,
    variant: str,
    execution: Execution = "compiled",
) -> Setting:
    """Returns where a parameter's update runs."""
    return Setting(
        xp, load_schema("adafactor").variant(variant)["constants"], hyper, rule, xp.dtype(param), execution
    )


def init(
    xp: Backend, param: Value, rule: Rule, hyper: Hyperparameters, variant: str = "t5x"
) -> dict[str, Value]:
    """Returns the slots of a parameter before its first update: zeros, in the dtypes that the variant gives them."""
    s = setting(xp, param, rule, hyper, variant)
    return {
        name: xp.zeros(param, shape, s.momentum_dtype if name == "m" else s.second_moment_dtype)
        for name, shape in slot_shapes(rule, xp.shape(param), s.momentum).items()
    }


def update(
    xp: Backend,
    param: Value,
    grad: Value,
    slots: Slots,
    rule: Rule,
    hyper: Hyperparameters,
    learning_rate: Value | None,
    step: Value,
    execution: Execution = "compiled",
    variant: str = "t5x",
) -> tuple[Value, dict[str, Value]]:
    """Returns the parameter and its slots after one update.

    Args:
        xp: The array namespace.
        param: The parameter, any floating dtype; its dtype is kept.
        grad: Its gradient, same shape.
        slots: The slots that `init` names, before the update.
        rule: How the parameter is factored.
        hyper: Hyperparameters.
        learning_rate: Number or 0-d array, used as float32, before parameter scale; None where the variant has its own.
        step: Updates done so far (int, or 0-d integer array).
        execution: Which roundings of low precision the original makes.
        variant: Whose rule.

    Source: `schemas/adafactor.json`, `steps` and each variant's `sources`.
    """
    s = setting(xp, param, rule, hyper, variant, execution)
    storage = STORAGE[s.form["parameter_storage"]]
    old, g = storage.decode(s, param), xp.widen(grad)
    if hyper.maximize:
        g = -g
    decay, mix = forms.DECAY[hyper.decay_type](s, step)
    given = None if learning_rate is None else xp.widen(learning_rate)
    rate = forms.LEARNING_RATE[s.form["lr_source"]](s, given, step)
    place = s.form["weight_decay_place"]
    early = forms.weight_decay(s, given, rate) if place in ("first", "after_scale") else None
    base = forms.DECAYED[s.form["weight_decay_expression"]](s, old, early) if early is not None else old
    scale = forms.parameter_scale(s, base if place == "first" else old)
    step_size = rate if scale is None else rate * scale
    if s.form["xla_perturbation"]:
        tiny = xp.mean(g * g + s.epsilon1, tuple(range(len(xp.shape(g))))) * xp.constant(1e-30)
        decay, mix, step_size = decay + tiny, 1.0 - (decay + tiny), step_size + tiny
    new, y = _second_moment(s, g, slots, decay, mix)
    u = step_size * y
    if hyper.clipping_threshold is not None:
        rms = xp.sqrt(s.mean_over(y * y, s.form["clipping_over"]))
        factor = xp.maximum(rms / xp.constant(hyper.clipping_threshold), 1.0)
        u = forms.CLIP[s.form["clipping_applies_to"]](s, step_size, y, factor)
    if s.momentum:
        u = new["m"] = _momentum(s, u, slots["m"])
    late = forms.weight_decay(s, given, step_size) if place == "last" else None
    after = forms.applied(s, base, u, late)
    stored = {name: xp.narrow(value, xp.dtype(slots[name])) for name, value in new.items()}
    param_after = storage.encode(s, after, step)
    if hyper.skip_nan_updates:
        stored = {name: xp.keep_nan(value, slots[name]) for name, value in stored.items()}
        param_after = xp.keep_nan(param_after, param)
    return param_after, stored


def clip_by_global_norm(
    xp: Backend, grads: Mapping[str, Value], threshold: float | None, execution: Execution = "compiled"
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


def group_update(
    xp: Backend,
    params: Mapping[str, Value],
    grads: Mapping[str, Value],
    slots: Mapping[str, Slots],
    rules: Mapping[str, Rule],
    group: Group,
    learning_rate: Value | None,
    step: Value,
    execution: Execution = "compiled",
    variant: str = "t5x",
) -> tuple[dict[str, Value], dict[str, dict[str, Value]]]:
    """Updates every parameter of a group that has a gradient; the global norm is taken over the group."""
    clipped = clip_by_global_norm(
        xp, grads, group.hyperparameters.get("global_norm_clip_threshold"), execution
    )
    new_params, new_slots = dict(params), {path: dict(s) for path, s in slots.items()}
    for path, grad in clipped.items():
        new_params[path], new_slots[path] = update(
            xp, params[path], grad, slots[path], rules[path], hyperparameters(group, path, variant),
            learning_rate, step, execution, variant,
        )  # fmt: skip
    return new_params, new_slots


def next_decay(step: int, step_offset: int, decay_rate: float) -> float:
    """Returns the second-moment decay of the next update, as a number for people.

    Raises:
        UsageError: The offset lies beyond the step, where the decay is -inf or NaN.
    """
    if step_offset > step:
        raise UsageError(
            "The step offset lies beyond the step; the second moment would become NaN for good.",
            expected=f"step_offset <= {step}",
            found=step_offset,
        )
    return 1.0 - math.pow(step - step_offset + 1, -decay_rate)


def _second_moment(
    s: Setting, g: Value, slots: Slots, decay: Value, mix: Value
) -> tuple[dict[str, Value], Value]:
    """Returns the new second moment, and the gradient divided by its root."""
    xp, rule = s.xp, s.rule
    q = forms.SQUARE[s.form["epsilon1_place"]](s, g)
    blend, form = forms.BLEND[s.form["second_moment_update"]], s.form["precondition_form"]
    if not rule.factored:
        v = blend(s, xp.widen(slots["v"]), q, decay, mix)
        return {"v": v}, forms.UNFACTORED[form](s, g, v)
    rows, columns = rule.dims(Axis.ROW), rule.dims(Axis.COLUMN)
    v_row = blend(s, xp.widen(slots["v_row"]), xp.mean(q, columns), decay, mix)
    v_col = blend(s, xp.widen(slots["v_col"]), xp.mean(q, rows), decay, mix)
    left = tuple(row - sum(column < row for column in columns) for row in rows)
    mean = forms.NORMALISER[s.form["normaliser"]](s, xp.mean(v_row, left, keepdims=True))
    row, col = xp.expand(v_row, columns), xp.expand(v_col, rows)
    return {"v_row": v_row, "v_col": v_col}, forms.FACTORED[form](s, g, row, col, xp.expand(mean, columns))


def _momentum(s: Setting, u: Value, m: Value) -> Value:
    beta1 = s.hyper.beta1
    assert beta1 is not None
    held = "float32" if s.form["momentum_constant"] == "exact" else s.momentum_dtype
    kept = forms.MOMENTUM_PRODUCT[s.form["momentum_product"]](s, s.xp.widen(m) * s.xp.constant(beta1, held))
    return kept + u * s.xp.constant(1.0 - beta1)


def check(state: TrainState, group: Group) -> None:
    """Raises UnknownRuleError if a rule or hyperparameter of a group is unknown."""
    form = load_schema("adafactor").variant(str(state.optimizer.variant))["constants"]
    for path in group.paths:
        dtype = state.params[path].dtype.name
        if form["compute_dtype"] != "float32" and dtype != "float32":
            raise UnknownRuleError(
                "This variant rounds every operation of low precision, and that isn't reproduced yet.",
                place=path,
                expected="float32",
                found=dtype,
            )
        check_rule(state.rules.get(path), path, len(state.params[path].shape))
        hyperparameters(group, path, str(state.optimizer.variant))


def start(
    xp: Backend, params: Mapping[str, Value], rules: Mapping[str, Rule], group: Group, variant: str
) -> tuple[dict[str, dict[str, Value]], dict[str, Value]]:
    """Returns the slots of every parameter of a group before its first update."""
    return {
        p: init(xp, params[p], rules[p], hyperparameters(group, p, variant), variant) for p in group.paths
    }, {}


def move(
    xp: Backend,
    params: Mapping[str, Value],
    grads: Mapping[str, Value],
    slots: Mapping[str, Slots],
    shared: Slots,
    rules: Mapping[str, Rule],
    group: Group,
    variant: str,
    learning_rate: Value | None,
    step: Value,
    execution: Execution,
) -> tuple[dict[str, Value], dict[str, dict[str, Value]], Slots]:
    """Returns a group's parameters and slots after one update."""
    moved, kept = group_update(
        xp, params, grads, slots, rules, group, learning_rate, step, execution, variant
    )
    return moved, kept, shared
