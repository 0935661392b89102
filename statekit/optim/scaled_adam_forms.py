"""The forms in which generations of ScaledAdam differ, each a small function under the name its schema gives it.

`schemas/scaled_adam.json` says of every generation which form it has; statekit.optim.scaled_adam puts them together.
In all of them s is the setting, m the parameter in motion, x the relative step of its size (None for one element).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from statekit.arrays.backend import Value
from statekit.arrays.promotion import promoted
from statekit.optim import steps
from statekit.state.constants import ScaledAdamConstants
from statekit.state.hyperparameters import settled
from statekit.state.train_state import Group


@dataclass(frozen=True)
class ScaledAdamHyperparameters:
    """What a group's update needs, in icefall's names. `schemas/scaled_adam.json` explains each."""

    clipping_scale: float | None
    betas: tuple[float, float]
    scalar_lr_scale: float
    eps: float
    param_min_rms: float
    param_max_rms: float
    scalar_max: float
    size_update_period: int
    clipping_update_period: int


def hyperparameters(group: Group, variant: str) -> ScaledAdamHyperparameters:
    """Returns what a group's update needs.

    Raises:
        UnknownRuleError: A hyperparameter is unknown; lists all that are.
    """
    hyper = settled(ScaledAdamHyperparameters, "scaled_adam", variant, group)
    beta1, beta2 = hyper.betas
    return replace(hyper, betas=(beta1, beta2))


@dataclass(frozen=True)
class ScaledAdamSetting(steps.Setting[ScaledAdamConstants, ScaledAdamHyperparameters]):
    """Where a group's update runs.

    Attributes:
        rate: Learning rate; a number counts as float64.
        step: Updates done so far (int, or 0-d integer array).
    """

    rate: Value
    step: Value

    @property
    def scalar_rate(self) -> Value:
        """The learning rate of one-element parameters and of sizes."""
        return self.rate * self.xp.number(self.hyper.scalar_lr_scale)

    @property
    def period_ends(self) -> Value:
        """Whether param_rms is refreshed and, but for k = 0, the size updated."""
        period = self.hyper.size_update_period
        return self.step % period == period - 1

    @property
    def size_due(self) -> Value:
        """Whether sizes are updated."""
        return self.period_ends & (self.step > 0)

    def kept(self, value: Value, *dtypes: str) -> Value:
        """Rounds what left an operation to the dtype that PyTorch promotes its operands to."""
        dtype = promoted(*dtypes)
        return value if dtype == "float32" else self.xp.rounded(value, dtype)

    def added(self, number: Value, *dtypes: str) -> Value:
        """Returns a number as PyTorch rounds it to add it to arrays of these dtypes, or to fill them.

        Its CPU kernels round such a number to the arrays' dtype, where those that multiply or divide keep it float32.
        Source: torch 2.13 on bfloat16, and the recording zipformer2025_bf16, resumed_trajectory.
        """
        return number if promoted(*dtypes) == "float32" else self.kept(self.xp.widen(number), *dtypes)

    def plus(self, value: Value, number: Value, other: Value, *dtypes: str) -> Value:
        """Returns value + number * other, rounded, as PyTorch's `add` with alpha on arrays of these dtypes.

        Its CPU kernel rounds the product where an element lies outside of whole vectors, and only there.
        Source: as for `added`.
        """
        dtype, weight = promoted(*dtypes), self.added(number, *dtypes)
        if dtype == "float32":
            return value + weight * other
        product = weight * other
        total = self.xp.either(lambda: value + product, lambda: value + self.xp.rounded(product, dtype))
        return self.kept(total, dtype)


@dataclass(frozen=True)
class Moving:
    """One parameter in the middle of its update, widened; slots are after the update so far.

    Attributes:
        param: The parameter before the update.
        grad: The gradient that second moment and direction use.
        dtypes: Those of parameter, gradient and slots.
        one: Whether it has one element.
    """

    param: Value
    grad: Value
    slots: Mapping[str, Value]
    dtypes: tuple[str, str, str]
    one: bool


def root(s: ScaledAdamSetting, m: Moving) -> Value:
    """Returns sqrt(v / c) + eps."""
    xp, v, state = s.xp, m.slots["exp_avg_sq"], m.dtypes[2]
    beta2 = s.hyper.betas[1]
    correction = xp.one_minus_power(beta2, s.step + 1)
    if m.one and s.form["scalar_bias_correction"] == "always":
        v = s.kept(v / correction, state)
    else:
        v = xp.where(s.step < corrected_updates(beta2), s.kept(v * (1.0 / correction), state), v)
    return s.kept(s.kept(xp.sqrt(v), state) + s.added(s.hyper.eps, state), state)


def corrected_updates(beta2: float) -> int:
    """Returns the number of first updates for which 1 - beta2^(k+1) < 0.99 holds in float64."""
    near = max(int(math.log(0.01) / math.log(beta2)) - 2, 0)
    return next(k for k in range(near, near + 6) if not 1.0 - beta2 ** (k + 1) < 0.99)


def _accumulate(s: ScaledAdamSetting, m: Moving, x: Value) -> Value:
    p_dtype, g_dtype, state = m.dtypes
    beta1 = s.hyper.betas[0]
    rest = s.xp.number(1.0 - beta1)
    delta = s.kept(m.slots["delta"] * beta1, state)
    if not m.one:
        grown = s.kept(m.param * x, p_dtype, state)
        sized = s.kept(s.plus(delta, 1.0 - beta1, grown, p_dtype, state), state)
        delta = s.xp.where(s.size_due, sized, delta)
    direction = s.kept(m.grad / root(s, m), g_dtype, state)
    if m.one:
        return s.kept(s.plus(delta, -s.scalar_rate * rest, direction, g_dtype, state), state)
    scale = s.kept((-s.rate * rest) * at_least(s, m.slots["param_rms"], state), state)
    return s.kept(delta + s.kept(direction * scale, g_dtype, state), state)


def _blend(s: ScaledAdamSetting, m: Moving, x: Value) -> Value:
    p_dtype, g_dtype, state = m.dtypes
    beta1, both = s.hyper.betas[0], (g_dtype, state)
    rate = s.scalar_rate if m.one else s.rate
    y = s.kept(s.kept(-rate * m.grad, g_dtype) / root(s, m), *both)
    if not m.one:
        y = s.kept(y * at_least(s, m.slots["param_rms"], state), *both)
        y = s.xp.where(s.size_due, s.kept(y + s.kept(m.param * x, p_dtype, state), *both), y)
    return s.kept(s.plus(s.kept(m.slots["delta"] * beta1, state), 1.0 - beta1, y, *both), state)


MOMENTUM: Mapping[str, Callable[[ScaledAdamSetting, Moving, Value], Value]] = {
    "accumulate": _accumulate,
    "blend": _blend,
}


def at_least(s: ScaledAdamSetting, rms: Value, dtype: str) -> Value:
    """Returns max(param_rms, param_min_rms)."""
    return s.xp.maximum(rms, s.xp.constant(s.hyper.param_min_rms, dtype))


def _replace(s: ScaledAdamSetting, x: Value, rms: Value, dtype: str) -> Value:
    largest = s.added(-s.scalar_rate * s.xp.number(s.hyper.size_update_period), dtype)
    return s.xp.if_greater(rms, s.xp.constant(s.hyper.param_max_rms, dtype), largest, x)


def _limit(s: ScaledAdamSetting, x: Value, rms: Value, dtype: str) -> Value:
    room = s.kept(s.kept(s.added(s.hyper.param_max_rms, dtype) - rms, dtype) / rms, dtype)
    return s.xp.minimum(x, room)


MAX_RMS: Mapping[str, Callable[[ScaledAdamSetting, Value, Value, str], Value]] = {
    "replace": _replace,
    "limit": _limit,
}
