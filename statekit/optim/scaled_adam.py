"""ScaledAdam (Yao et al. 2023, arXiv 2310.11230), in the five generations that icefall and GPT-SoVITS ran.

One parameter p of more than one element with gradient g and learning rate a, at count k (updates done before this one):

    v = beta2 v + (1-beta2) g^2
    y = -a g / (sqrt(v / c) + eps) * max(r, param_min_rms),  c = 1 - beta2^(k+1) while that is below 0.99, then 1
    h[k mod T] = sum(p g);  r = rms(p) at the first update and where k mod T = T - 1
    where k mod T = T - 1 and k > 0, with b = beta2^T, j = (k+1) // T, a' = a scalar_lr_scale:
        w = b w + (1-b) mean(h^2)
        x = -a' sqrt(1 - b^j) sum(h) / (sqrt(w) + eps), 0 where r < param_min_rms, limited
        y = y + p x
    delta = beta1 delta + (1-beta1) y,  p = p + delta

A parameter of one element takes y = -a' g / (sqrt(v / c) + eps) and is kept within scalar_max. Before all this, a
group's gradients are clipped against the median of their own norms (`statekit.optim.scaled_adam_clip`). Where the
generations differ, `schemas/scaled_adam.json` has the name of the form as a constant.

The originals run op by op in PyTorch: what leaves an operation has the dtype that PyTorch promotes its operands to, and
that rounding is part of the rule.

Source: k2-fsa/icefall, egs/librispeech/ASR/zipformer/optim.py, `basic_step`, `scaling_step`, `momentum_step`, and
`ScaledAdam._step_one_batch` of the older generations; RVC-Boss/GPT-SoVITS, GPT_SoVITS/AR/modules/optim.py.
"""

from __future__ import annotations

import math

from statekit.arrays.backend import Backend, Value
from statekit.errors import StateError
from statekit.optim import scaled_adam_clip
from statekit.optim.scaled_adam_forms import (
    MAX_RMS,
    MOMENTUM,
    Moving,
    ScaledAdamHyperparameters,
    ScaledAdamSetting,
    hyperparameters,
)
from statekit.optim.steps import Arrays, Scene, Slots, stored
from statekit.state.constants import variant_constants
from statekit.state.train_state import Group, Rule, TrainState


def settle(group: Group, path: str, rule: Rule | None, variant: str) -> ScaledAdamHyperparameters:
    """Returns what a parameter's update needs."""
    return hyperparameters(group, variant)


def init(xp: Backend, param: Value, config: ScaledAdamHyperparameters, variant: str) -> dict[str, Value]:
    """Returns the slots of a parameter before its first update: zeros.

    `param_rms` gets its first value in the first update: the originals have no slots before.
    """
    stored_in = variant_constants("scaled_adam", variant)["state_dtype"]
    dtype = xp.dtype(param) if stored_in == "parameter" else str(stored_in)
    shape = xp.shape(param)
    alone = (1,) * len(shape)
    shapes = {"delta": shape, "exp_avg_sq": shape}
    if math.prod(shape) != 1:
        history = (config.size_update_period, *alone)
        shapes |= {"param_rms": alone, "scale_exp_avg_sq": alone, "scale_grads": history}
    return {name: xp.zeros(param, axes, dtype) for name, axes in shapes.items()}


def begin(xp: Backend, params: Arrays, group: Group, variant: str) -> dict[str, Value]:
    """Returns the slots of a group as a whole before its first update."""
    hyper = hyperparameters(group, variant)
    return scaled_adam_clip.init(xp, next(iter(params.values())), hyper) if params else {}


def prepare(
    scene: Scene, group: Group, params: Arrays, grads: Arrays, slots: Slots, shared: Arrays
) -> tuple[Arrays, Arrays, Value | None]:
    """Returns a gradient for every parameter (zeros for a missing one), and the factor of clipping (None without)."""
    xp, s = scene.xp, setting(scene, hyperparameters(group, scene.variant))
    full = {
        path: grads[path] if path in grads else xp.zeros(p, xp.shape(p), xp.dtype(p))
        for path, p in params.items()
    }
    if s.hyper.clipping_scale is None or not params:
        return full, shared, None
    buffers = shared or scaled_adam_clip.init(xp, next(iter(params.values())), s.hyper)
    return full, *scaled_adam_clip.clip(s, params, full, slots, buffers)


def setting(scene: Scene, hyper: ScaledAdamHyperparameters) -> ScaledAdamSetting:
    """Returns where a group's update runs."""
    constants = variant_constants("scaled_adam", scene.variant)
    return ScaledAdamSetting(scene.xp, constants, hyper, scene.xp.number(scene.rate), scene.step)


def update(
    scene: Scene,
    param: Value,
    grad: Value,
    slots: Arrays,
    config: ScaledAdamHyperparameters,
    common: Value | None,
) -> tuple[Value, dict[str, Value]]:
    """Returns a parameter and its slots after one update, as `statekit.optim.steps.Steps.update`.

    `common` is what clipping multiplies gradients with, None without clipping.
    """
    s = setting(scene, config)
    xp, shape = s.xp, s.xp.shape(param)
    is_single = math.prod(shape) == 1
    p, g = xp.widen(param), xp.widen(grad)
    dtypes = xp.dtype(param), xp.dtype(grad), xp.dtype(slots["delta"])
    short = g if common is None else scaled_adam_clip.reached(s, grad, common)
    used = short if s.form["clip_reaches"] == "everything" else g
    wide = {name: xp.widen(value) for name, value in slots.items()}
    x = None
    if not is_single:
        wide, x = _sized(s, p, s.kept(p * short, *dtypes[:2]), wide, dtypes)
    wide["exp_avg_sq"] = _second_moment(s, wide["exp_avg_sq"], used, dtypes[2])
    wide["delta"] = MOMENTUM[s.form["delta_form"]](s, Moving(p, used, wide, dtypes, is_single), x)
    if is_single and s.form["scalar_clamp"] == "before_delta":
        p = _clamped(s, p, dtypes[0])
    p = s.kept(p + wide["delta"], dtypes[0])
    if is_single and s.form["scalar_clamp"] == "after_delta":
        p = _clamped(s, p, dtypes[0])
    return xp.narrow(p, dtypes[0]), stored(xp, {name: wide[name] for name in slots}, slots)


def _second_moment(s: ScaledAdamSetting, v: Value, g: Value, dtype: str) -> Value:
    beta2 = s.hyper.betas[1]
    return s.kept(s.kept(v * beta2, dtype) + ((1.0 - beta2) * g) * g, dtype)


def _clamped(s: ScaledAdamSetting, p: Value, dtype: str) -> Value:
    limit = s.xp.constant(s.hyper.scalar_max, dtype)
    return s.xp.minimum(s.xp.maximum(p, -limit), limit)


def _sized(
    s: ScaledAdamSetting, p: Value, products: Value, slots: Arrays, dtypes: tuple[str, str, str]
) -> tuple[dict[str, Value], Value]:
    """Returns the slots with those that learn the parameter's size moved on, and the relative step x of its size.

    Args:
        s: Where the update runs.
        p: The parameter, widened.
        products: p g, with the clipped gradient.
        slots: All slots, widened.
        dtypes: Those of parameter, gradient and slots.
    """
    xp, state, axes = s.xp, dtypes[2], tuple(range(len(s.xp.shape(p))))
    gradient = xp.expand(s.kept(s.kept(xp.sum(products), *dtypes[:2]), state), axes)
    square = s.kept(xp.mean(s.kept(p * p, dtypes[0]), axes, keepdims=True), dtypes[0])
    return sized(s, gradient, s.kept(s.kept(xp.sqrt(square), dtypes[0]), state), slots, state)


def sized(
    s: ScaledAdamSetting, gradient: Value, refreshed: Value, slots: Arrays, state: str
) -> tuple[dict[str, Value], Value]:
    """Returns the slots with those that learn the parameter's size moved on, and the relative step x of its size.

    Args:
        s: Where the update runs.
        gradient: The sum of p g, of the parameter's rank.
        refreshed: The parameter's root mean square now, likewise.
        slots: All slots, widened.
        state: The slots' dtype.
    """
    xp, step, period = s.xp, s.step, s.hyper.size_update_period
    axes = tuple(range(len(xp.shape(gradient))))
    history = xp.set_row(slots["scale_grads"], step % period, gradient)
    rms = xp.where(s.period_ends | (step == 0), refreshed, slots["param_rms"])
    base = s.hyper.betas[1] ** period
    mean = s.kept(xp.mean(s.kept(history * history, state), (0,)), state)
    moment = s.plus(s.kept(slots["scale_exp_avg_sq"] * base, state), 1.0 - base, mean, state)
    moment = xp.where(s.size_due, moment, slots["scale_exp_avg_sq"])
    total = xp.expand(s.kept(xp.sum(history), state), axes)
    slope = -s.scalar_rate * xp.sqrt(xp.one_minus_power(base, (step + 1) // period))
    denominator = s.kept(s.kept(xp.sqrt(moment), state) + s.added(s.hyper.eps, state), state)
    x = s.kept(s.kept(slope * total, state) / denominator, state)
    x = _limited(s, x, rms, state)
    return {**slots, "scale_grads": history, "param_rms": rms, "scale_exp_avg_sq": moment}, x


def _limited(s: ScaledAdamSetting, x: Value, rms: Value, dtype: str) -> Value:
    """Returns x limited by the parameter's size: 0 if that is too small, reduced if it is too large."""
    xp, limit = s.xp, s.form["size_step_limit"]
    x = xp.if_greater(-rms, -xp.constant(s.hyper.param_min_rms, dtype), xp.widen(0.0), x)
    if limit != "none":
        edge = xp.constant(limit, dtype)
        x = xp.minimum(xp.maximum(x, -edge), edge)
    return MAX_RMS[s.form["max_rms_rule"]](s, x, rms, dtype)


def check(state: TrainState, group: Group) -> None:
    """Raises where the step can't go on as the original would.

    Raises:
        UnknownRuleError: A hyperparameter is unknown.
        StateError: A buffer doesn't have the length of its period.
    """
    hyper = hyperparameters(group, str(state.optimizer.variant))
    buffers = {
        f"{path} scale_grads": (state.slots[path]["scale_grads"], hyper.size_update_period)
        for path in group.paths
        if "scale_grads" in state.slots.get(path, {})
    }
    if "model_norms" in group.slots:
        buffers["model_norms"] = group.slots["model_norms"], hyper.clipping_update_period
    for place, (tensor, period) in buffers.items():
        if tensor.shape[0] != period:
            raise StateError(
                "A buffer doesn't have the length of the period that fills it.",
                place=place,
                expected=period,
                found=tensor.shape[0],
                remedy="keep size_update_period and clipping_update_period as they were in the run",
            )
