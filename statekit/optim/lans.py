"""LANS (Zheng et al. 2020, arXiv 2006.13484): LAMB with Nesterov's momentum, as MXNet, the paper and Apex have it.

One parameter p with gradient g, learning rate lr and weight decay w, at the t-th update, norms over the tensor:

    g = g / ||g||                                                    (and clipped by element)
    m = beta1 m + (1-beta1) g,  v = beta2 v + (1-beta2) g^2
    D = sqrt(v / (1 - beta2^t)) + epsilon
    a = (m / (1 - beta1^t)) / D + w p,  b = g / D + w p
    p = p - lr (beta1 r / ||a|| a + (1-beta1) r / ||b|| b),  r = min(max(||p||, lower_bound), upper_bound)

A parameter in 16 bits has a float32 master, which is what moves; MXNet has one beside float16, statekit beside bfloat16
too. MXNet's two paths differ: the Python one takes the weight
decay of b from the parameter that the first half has moved already. `schemas/lans.json` has the name of each form.

Source: apache/mxnet, src/operator/contrib/multi_lans.cc, `MultiLANSKernelStep1`, `MultiLANSKernelStep2`;
python/mxnet/optimizer/lans.py, `LANS.step`; szhengac/apex, csrc/multi_tensor_lans.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from statekit.arrays.backend import Backend, Value
from statekit.arrays.promotion import LOW
from statekit.optim import steps
from statekit.optim.adam_moments import (
    CORRECTION,
    FIRST,
    RATE,
    SECOND,
    Decay,
    decay,
    decay_float32,
    slots_like,
)
from statekit.optim.lamb import NORM, RATIO
from statekit.optim.steps import Arrays, Scene, Slots, no_group_slots, stored
from statekit.state.constants import LansConstants, variant_constants
from statekit.state.hyperparameters import require_float32, require_slots, settled
from statekit.state.train_state import Group, Rule, TrainState


@dataclass(frozen=True)
class LansHyperparameters:
    """What a group's update needs, in canonical names. `schemas/lans.json` explains each."""

    beta1: float
    beta2: float
    epsilon: float
    wd: float
    lower_bound: float | None
    upper_bound: float | None
    clip_gradient: float | None
    rescale_grad: float
    begin_num_update: int
    bias_correction: bool
    grad_averaging: bool
    normalize_grad: bool
    adam_w_mode: bool
    multi_precision: bool


@dataclass(frozen=True)
class Multipliers:
    """By how much single parameters' learning rate and weight decay differ from the group's, by path."""

    lr_mult: Mapping[str, float]
    wd_mult: Mapping[str, float]


@dataclass(frozen=True)
class ParamConfig:
    """All that one parameter's update depends on beside arrays and scene."""

    hyper: LansHyperparameters
    lr_mult: float
    wd: float


@dataclass(frozen=True)
class LansSetting(steps.Setting[LansConstants, LansHyperparameters]):
    """Where one parameter's update runs.

    Attributes:
        rate: The parameter's own learning rate, as the original holds it.
        wd: The parameter's own weight decay.
        count: The parameter's updates done so far, as the original counts them.
    """

    rate: Value
    wd: float
    count: Value

    @cached_property
    def first(self) -> Decay:
        """Weights of the first moment, and of the two halves of the update."""
        weights = DECAY[self.form["constants_precision"]](self.xp, self.hyper.beta1)
        return weights if self.hyper.grad_averaging else Decay(weights.old, 1.0)

    @cached_property
    def second(self) -> Decay:
        """Weights of the second moment."""
        return DECAY[self.form["constants_precision"]](self.xp, self.hyper.beta2)

    def corrected(self, moment: Value, beta: float) -> Value:
        """Returns a moment, corrected for its zero start."""
        if not self.hyper.bias_correction:
            return moment
        return moment / CORRECTION[self.form["constants_precision"]](self.xp, beta, self.count + 1)

    def norm(self, value: Value) -> Value:
        """Returns the norm of a tensor."""
        return NORM[self.form["norm_accumulation"]](self.xp, value)

    def ratio(self, top: Value, bottom: Value, otherwise: Value) -> Value:
        """Returns top / bottom, or a fallback where there is no ratio."""
        return RATIO[self.form["trust_ratio_fallback"]](self.xp, top, bottom, otherwise)


DECAY: Mapping[str, Callable[[Backend, float], Decay]] = {
    "float32": decay_float32,
    "float64_on_float32": decay_float32,
    "float64_rounded": decay,
    "unspecified": decay,
}


SECOND_SHARE: Mapping[str, Callable[[LansSetting], Value]] = {
    "float64_product": lambda s: s.xp.number(1.0 - s.xp.constant(s.hyper.beta1)),
    "float32": lambda s: s.first.new,
    "unspecified": lambda s: s.first.new,
}
"""The weight of the second half of the update."""


def _over_norm_and_epsilon(s: LansSetting, g: Value) -> Value:
    norm = s.norm(g)
    return g / s.xp.if_greater(norm, 0.0, norm + s.xp.constant(s.hyper.epsilon), 1.0 + norm)


NORMALISED: Mapping[str, Callable[[LansSetting, Value], Value]] = {
    "norm": lambda s, g: g / s.norm(g),
    "norm_plus_epsilon": _over_norm_and_epsilon,
}


def _clamp(s: LansSetting, g: Value, edge: float) -> Value:
    return s.xp.minimum(s.xp.maximum(g, -edge), edge)


def _clamp_nan_too(s: LansSetting, g: Value, edge: float) -> Value:
    g = s.xp.if_greater(-g, -edge, g, edge)  # CUDA's min and max prefer the number to NaN
    return s.xp.if_greater(g, -edge, g, -edge)


CLAMPED: Mapping[str, Callable[[LansSetting, Value, float], Value]] = {
    "nan": _clamp,
    "nan_unless_clipped": _clamp_nan_too,
}


def _limit(s: LansSetting, limit: float | None) -> float | None:
    """Returns a limit; None where it is off. 0.0 counts as off or not, by `false_bounds`."""
    off = limit is None or (s.form["false_bounds"] == "ignored" and limit <= 0)
    return None if off else limit


def bounded(s: LansSetting, norm: Value) -> Value:
    """Returns the norm of a parameter within its bounds."""
    lower, upper = _limit(s, s.hyper.lower_bound), _limit(s, s.hyper.upper_bound)
    if lower is not None:
        norm = s.xp.maximum(norm, s.xp.constant(lower))
    return norm if upper is None else s.xp.minimum(norm, s.xp.constant(upper))


def coefficient(s: LansSetting, weight: Value, norm: Value, share: Value) -> Value:
    """Returns learning rate * ratio * share of one half of the update."""
    if s.form["rate_product"] == "norm_first":
        return s.ratio(s.rate * weight, norm, s.rate) * share
    ratio = s.ratio(weight, norm, 1.0)
    return s.rate * (ratio * share) if s.form["rate_product"] == "ratio_first" else s.rate * ratio * share


def settle(group: Group, path: str, rule: Rule | None, variant: str) -> ParamConfig:
    """Returns what a parameter's update needs."""
    hyper = settled(LansHyperparameters, "lans", variant, group)
    by_path = settled(Multipliers, "lans", variant, group)
    return ParamConfig(hyper, by_path.lr_mult.get(path, 1.0), hyper.wd * by_path.wd_mult.get(path, 1.0))


def init(xp: Backend, param: Value, config: ParamConfig, variant: str) -> dict[str, Value]:
    """Returns the slots of a parameter before its first update: zeros, and a master of float16."""
    slots = slots_like(xp, param, {"m": "float32", "v": "float32"})
    if config.hyper.multi_precision and xp.dtype(param) in LOW:
        slots["master"] = xp.narrow(xp.widen(param), "float32")
    return slots


begin = no_group_slots


def prepare(
    scene: Scene, group: Group, params: Arrays, grads: Arrays, slots: Slots, shared: Arrays
) -> tuple[Arrays, Arrays, None]:
    """Returns the gradients as they are: every parameter's is normalised by itself."""
    return grads, shared, None


def update(
    scene: Scene, param: Value, grad: Value, slots: Arrays, config: ParamConfig, common: None
) -> tuple[Value, dict[str, Value]]:
    """Returns a parameter and its slots after one update, as `statekit.optim.steps.Steps.update`.

    A parameter in 16 bits has a slot `master`, which is what moves.
    """
    xp, hyper, constants = scene.xp, config.hyper, variant_constants("lans", scene.variant)
    rate = RATE[constants["lr_precision"]](xp, scene.rate) * config.lr_mult
    s = LansSetting(xp, constants, hyper, rate, config.wd, scene.step + hyper.begin_num_update)
    p = xp.widen(slots.get("master", param))
    g = _gradient(s, p, xp.widen(grad))
    m = FIRST["weighted_sum"](xp, xp.widen(slots["m"]), g, s.first)
    v = SECOND[s.form["second_moment_update"]](xp, xp.widen(slots["v"]), g, s.second)
    root = xp.sqrt(s.corrected(v, hyper.beta2)) + xp.constant(hyper.epsilon)
    weight = bounded(s, s.norm(xp.widen(param) if s.form["weight_norm_of"] == "stored" else p))
    a = _decayed(s, s.corrected(m, hyper.beta1) / root, p)
    first = coefficient(s, weight, s.norm(a), s.first.old) * a
    b = _decayed(s, g / root, p - first if s.form["second_half_weight"] == "moved" else p)
    second = coefficient(s, weight, s.norm(b), SECOND_SHARE[s.form["second_half_factor"]](s)) * b
    p = p - (first + second) if s.form["application"] == "once" else p - first - second
    new = {"m": m, "v": v, "master": p}
    return xp.narrow(p, xp.dtype(param)), stored(xp, {name: new[name] for name in slots}, slots)


def _gradient(s: LansSetting, p: Value, g: Value) -> Value:
    """Returns the gradient that the moments see."""
    g = g * s.xp.constant(s.hyper.rescale_grad)
    if s.hyper.normalize_grad:
        g = NORMALISED[s.form["gradient_normalisation"]](s, g)
    edge = _limit(s, s.hyper.clip_gradient)
    if edge is not None:
        g = CLAMPED[s.form["zero_gradient"]](s, g, s.xp.constant(edge))
    return g if s.hyper.adam_w_mode else g + s.xp.constant(s.wd) * p


def _decayed(s: LansSetting, direction: Value, p: Value) -> Value:
    return direction + s.xp.constant(s.wd) * p if s.hyper.adam_w_mode else direction


def check(state: TrainState, group: Group) -> None:
    """Raises UnknownRuleError where the step can't go on as the original would."""
    for path in group.paths:
        require_slots(state, path, ("m", "v"))
        settle(group, path, None, str(state.optimizer.variant))
        dtype = state.params[path].dtype.name
        if dtype not in LOW or "master" not in state.slots.get(path, {}):
            require_float32(state, path)
