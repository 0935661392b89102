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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from statekit.backends import Backend, Value
from statekit.errors import UnknownRuleError, UsageError
from statekit.schema import load_schema
from statekit.state import Axis, Group, Rule, TrainState
from statekit.tensor import Shape

Execution: TypeAlias = Literal["op_by_op", "compiled"]
"""How the original ran: `op_by_op` rounds every low-precision product, `compiled` keeps products in float32."""

Slots: TypeAlias = Mapping[str, Value]


@dataclass(frozen=True)
class Hyperparameters:
    """What one parameter's update needs, in T5X's names. `schemas/adafactor.json` explains each."""

    beta1: float | None
    decay_rate: float
    step_offset: int
    clipping_threshold: float | None
    weight_decay_rate: float | None
    weight_decay_rate_lr_exponent: float | None
    multiply_by_parameter_scale: bool
    epsilon1: float
    epsilon2: float
    dtype_momentum: str
    max_parameter_scale: float | None
    skip_nan_updates: bool


_NEEDED = tuple(field.name for field in fields(Hyperparameters))


def hyperparameters(group: Group, path: str) -> Hyperparameters:
    """Returns what a parameter's update needs from its group.

    Raises:
        UnknownRuleError: A hyperparameter is unknown; lists all that are.
    """
    values = dict(group.hyperparameters)
    missing = [name for name in _NEEDED if name not in values]
    if missing:
        raise UnknownRuleError(
            "The step needs hyperparameters that the checkpoint doesn't say.",
            place=path,
            expected=", ".join(missing),
            remedy=f"give them: --hparams {missing[0]}=VALUE, or load_optimizer(..., {missing[0]}=VALUE)",
        )
    scale = values["multiply_by_parameter_scale"]
    values["multiply_by_parameter_scale"] = scale[path] if isinstance(scale, Mapping) else scale
    return Hyperparameters(**{name: values[name] for name in _NEEDED})


def defaults() -> dict[str, Any]:
    """Returns T5X's defaults for every hyperparameter, from the schema."""
    return dict(load_schema("adafactor").variants["t5x"]["defaults"])


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


def init(xp: Backend, param: Value, rule: Rule, hyper: Hyperparameters) -> dict[str, Value]:
    """Returns the slots of a parameter before its first update: zeros; float32, `m` in `dtype_momentum`."""
    shapes = slot_shapes(rule, xp.shape(param), hyper.beta1 is not None)
    return {
        name: xp.zeros(param, shape, hyper.dtype_momentum if name == "m" else "float32")
        for name, shape in shapes.items()
    }


def update(
    xp: Backend,
    param: Value,
    grad: Value,
    slots: Slots,
    rule: Rule,
    hyper: Hyperparameters,
    learning_rate: Value,
    step: Value,
    execution: Execution = "compiled",
) -> tuple[Value, dict[str, Value]]:
    """Returns the parameter and its slots after one update.

    Args:
        xp: The array namespace.
        param: The parameter, any floating dtype; its dtype is kept.
        grad: Its gradient, same shape.
        slots: The slots that `init` names, before the update.
        rule: How the parameter is factored.
        hyper: Hyperparameters.
        learning_rate: Number or 0-d array, used as float32; before parameter scale.
        step: Updates done so far (int, or 0-d integer array).
        execution: Which roundings of low precision the original makes.

    Source: T5X t5x/adafactor.py, `apply_param_gradient`.
    """
    dtype = xp.dtype(param)
    averaged = rule.dims(Axis.ROW, Axis.COLUMN, Axis.NONE)
    old, g, lr = xp.widen(param), xp.widen(grad), xp.widen(learning_rate)
    decay = _decay(xp, step, hyper)
    scale = lr
    if hyper.multiply_by_parameter_scale:
        scale = lr * _parameter_scale(xp, old, averaged, hyper, dtype, execution)
    new, y = _second_moment(xp, g, slots, rule, decay, hyper)
    if hyper.clipping_threshold is not None:
        rms = xp.sqrt(xp.mean(y * y, averaged, keepdims=True))
        y = y / xp.maximum(rms / xp.constant(hyper.clipping_threshold), 1.0)
    u = scale * y
    if hyper.beta1 is not None:
        u = _momentum(xp, u, slots["m"], hyper, execution)
        new["m"] = u
    after = _decayed(xp, old, lr, hyper, dtype, execution) - u
    stored = {name: xp.narrow(value, xp.dtype(slots[name])) for name, value in new.items()}
    param_after = xp.narrow(after, dtype)
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
        squares.append(xp.rounded(xp.sum(_rounder(xp, dtype, execution)(g * g)), dtype))
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
    learning_rate: Value,
    step: Value,
    execution: Execution = "compiled",
) -> tuple[dict[str, Value], dict[str, dict[str, Value]]]:
    """Updates every parameter of a group that has a gradient; the global norm is taken over the group."""
    clipped = clip_by_global_norm(
        xp, grads, group.hyperparameters.get("global_norm_clip_threshold"), execution
    )
    new_params, new_slots = dict(params), {path: dict(s) for path, s in slots.items()}
    for path, grad in clipped.items():
        new_params[path], new_slots[path] = update(
            xp, params[path], grad, slots[path], rules[path], hyperparameters(group, path),
            learning_rate, step, execution,
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


def _decay(xp: Backend, step: Value, hyper: Hyperparameters) -> Value:
    t = xp.widen(step - hyper.step_offset) + 1.0
    return 1.0 - xp.power(t, xp.constant(-hyper.decay_rate))


def _rounder(xp: Backend, dtype: str, execution: Execution) -> Callable[[Value], Value]:
    if execution == "compiled" or dtype == "float32":
        return lambda value: value
    return lambda value: xp.rounded(value, dtype)


def _parameter_scale(
    xp: Backend,
    param: Value,
    averaged: Sequence[int],
    hyper: Hyperparameters,
    dtype: str,
    execution: Execution,
) -> Value:
    product = _rounder(xp, dtype, execution)(param * param)
    # A compiler keeps the product in float32, but what leaves a reduction has the parameter's dtype in both executions
    # (recorded: golden t5x/bf16_params, trajectory and trajectory_jit).
    mean = xp.rounded(xp.mean(product, tuple(averaged), keepdims=True), dtype)
    rms = xp.rounded(xp.sqrt(mean), dtype)
    scale = xp.maximum(rms, xp.constant(hyper.epsilon2, dtype))
    if hyper.max_parameter_scale is not None:
        scale = xp.minimum(scale, xp.constant(hyper.max_parameter_scale, dtype))
    return scale


def _second_moment(
    xp: Backend, g: Value, slots: Slots, rule: Rule, decay: Value, hyper: Hyperparameters
) -> tuple[dict[str, Value], Value]:
    q = g * g + xp.constant(hyper.epsilon1)
    mix = 1.0 - decay
    if not rule.factored:
        v = decay * xp.widen(slots["v"]) + mix * q
        return {"v": v}, g * xp.power(v, -0.5)
    rows, columns = rule.dims(Axis.ROW), rule.dims(Axis.COLUMN)
    v_row = decay * xp.widen(slots["v_row"]) + mix * xp.mean(q, columns)
    v_col = decay * xp.widen(slots["v_col"]) + mix * xp.mean(q, rows)
    left = tuple(row - sum(column < row for column in columns) for row in rows)
    row_factor = xp.power(v_row / xp.mean(v_row, left, keepdims=True), -0.5)
    col_factor = xp.power(v_col, -0.5)
    return {"v_row": v_row, "v_col": v_col}, g * xp.expand(row_factor, columns) * xp.expand(col_factor, rows)


def _momentum(xp: Backend, u: Value, m: Value, hyper: Hyperparameters, execution: Execution) -> Value:
    beta1 = hyper.beta1
    assert beta1 is not None
    dtype = xp.dtype(m)
    kept = _rounder(xp, dtype, execution)(xp.widen(m) * xp.constant(beta1, dtype))
    return kept + u * xp.constant(1.0 - beta1)


def _decayed(
    xp: Backend, param: Value, lr: Value, hyper: Hyperparameters, dtype: str, execution: Execution
) -> Value:
    rate, exponent = hyper.weight_decay_rate, hyper.weight_decay_rate_lr_exponent
    if exponent:  # T5X tests for truth: a rate of 0 counts as 1 here, and an exponent of 0 as none
        decay = xp.power(lr, xp.constant(exponent)) * xp.constant(rate or 1.0)
        return (1.0 - decay) * param
    if rate is None:
        return param
    return _rounder(xp, dtype, execution)(param * xp.constant(1.0 - rate, dtype))


VARIANTS = ("t5x",)


def check(state: TrainState, group: Group) -> None:
    """Raises UnknownRuleError if a rule or hyperparameter of a group is unknown."""
    for path in group.paths:
        check_rule(state.rules.get(path), path, len(state.params[path].shape))
        hyperparameters(group, path)


def start(
    xp: Backend, params: Mapping[str, Value], rules: Mapping[str, Rule], group: Group, variant: str
) -> tuple[dict[str, dict[str, Value]], dict[str, Value]]:
    """Returns the slots of every parameter of a group before its first update."""
    return {p: init(xp, params[p], rules[p], hyperparameters(group, p)) for p in group.paths}, {}


def move(
    xp: Backend,
    params: Mapping[str, Value],
    grads: Mapping[str, Value],
    slots: Mapping[str, Slots],
    shared: Slots,
    rules: Mapping[str, Rule],
    group: Group,
    variant: str,
    learning_rate: Value,
    step: Value,
    execution: Execution,
) -> tuple[dict[str, Value], dict[str, dict[str, Value]], Slots]:
    """Returns a group's parameters and slots after one update."""
    moved, kept = group_update(xp, params, grads, slots, rules, group, learning_rate, step, execution)
    return moved, kept, shared
