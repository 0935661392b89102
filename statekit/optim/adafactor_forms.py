"""The forms in which implementations of Adafactor differ, each a small function under the name its schema gives it.

Which variant has which (where Keras' epsilons are added, what HF's learning rate is scaled by) stands in
`schemas/adafactor.json`: `variants.keras.constants` names the form, `differences.epsilon1_place` says what each form
is. statekit.optim.adafactor puts them together. In all of them s is the setting, g the gradient, p the parameter,
decay and mix the weights of the second moment's old and new value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from statekit.arrays.backend import Value
from statekit.errors import UnknownRuleError
from statekit.optim import steps
from statekit.state.constants import AdafactorConstants, Rounds
from statekit.state.hyperparameters import Exclusion
from statekit.state.train_state import Axis, Rule
from statekit.tensors.tensor import DTYPES, float_info


@dataclass(frozen=True)
class AdafactorHyperparameters:
    """What one parameter's update needs, in canonical names. `schemas/adafactor.json` explains each."""

    beta1: float | None
    decay_rate: float
    decay_type: str
    beta2: float | None
    second_moment_decay: float | None
    step_offset: int
    clipping_threshold: float | None
    weight_decay_rate: float | None
    weight_decay_rate_lr_exponent: float | None
    exclude_from_weight_decay: Exclusion
    multiply_by_parameter_scale: bool
    epsilon1: float | None
    epsilon2: float
    dtype_momentum: str
    max_parameter_scale: float | None
    skip_nan_updates: bool
    relative_step: bool
    warmup_init: bool
    maximize: bool
    simulated_quantize_bits: int | None
    activation_dtype: str
    use_ema: bool
    ema_momentum: float | None
    ema_overwrite_frequency: int | None
    own_rate_scaled: bool = True
    """Whether the optimizer as a whole scales by parameters: a rate of its own is smaller where it doesn't."""


@dataclass(frozen=True)
class Setting(steps.Setting[AdafactorConstants, AdafactorHyperparameters]):
    """Where one parameter's update runs.

    Attributes:
        rule: How the parameter is factored.
        dtype: The parameter's dtype.
        execution: Which roundings of low precision the original makes.
        rounds_added: Whether a number that is added to arrays, or a multiple of it, is rounded to their dtype first.
    """

    rule: Rule
    dtype: str
    execution: Rounds
    rounds_added: bool = True

    def mean_over(self, value: Value, over: str) -> Value:
        """Returns the mean over the `tensor`, or else over all axes that aren't BATCH; averaged axes stay as 1."""
        return self.xp.mean(value, self.averaged(over), keepdims=True)

    def averaged(self, over: str) -> tuple[int, ...]:
        """Returns the axes of the `tensor`, or else all that aren't BATCH."""
        return self.rule.dims(*(tuple(Axis) if over == "tensor" else (Axis.ROW, Axis.COLUMN, Axis.NONE)))

    def product(self, value: Value, dtype: str) -> Value:
        """Returns a product of low precision as the original leaves it."""
        return value if self.execution == "compiled" else self.xp.rounded(value, dtype)

    @property
    def compute_dtype(self) -> str:
        """The dtype that every operation of the original returns."""
        rounds_each = self.form["compute_dtype"] == "each_operation" and self.execution == "op_by_op"
        return self.dtype if rounds_each else "float32"

    def returned(self, value: Value) -> Value:
        """Returns what an operation of the original returns."""
        return self.xp.rounded(value, self.compute_dtype)

    def constant(self, value: float) -> float:
        """Returns a number as an operation of the original takes it."""
        return self.xp.constant(value, self.compute_dtype)

    @cached_property
    def epsilon1(self) -> float:
        """The epsilon of the second moment; machine epsilon of the parameter's dtype where none is given."""
        given = self.hyper.epsilon1
        return float(float_info(DTYPES[self.dtype]).eps) if given is None else given

    @property
    def momentum(self) -> bool:
        """Whether there is a slot m."""
        return MOMENTUM_ON[self.form["momentum_on"]](self.hyper.beta1)

    @property
    def momentum_dtype(self) -> str:
        """The dtype in which m is stored."""
        named = {"dtype_momentum": self.hyper.dtype_momentum, "parameter": self.dtype}
        return named.get(self.form["momentum_dtype"], "float32")

    @property
    def second_moment_dtype(self) -> str:
        """The dtype in which v_row, v_col and v are stored."""
        return self.dtype if self.form["second_moment_dtype"] == "parameter" else "float32"


MOMENTUM_ON: Mapping[str, Callable[[float | None], bool]] = {
    "not_null": lambda beta1: beta1 is not None,
    "nonzero": bool,
    "never": lambda beta1: False,
}


def _pow_decay(s: Setting, step: Value) -> tuple[Value, Value]:
    power = s.xp.power(s.xp.widen(step - s.hyper.step_offset) + 1.0, s.xp.constant(-s.hyper.decay_rate))
    decay = 1.0 - power
    # Float64 keeps the digits of 1 - decay that float32 loses: there the new value's weight is the power itself.
    return decay, 1.0 - decay if s.form["decay_precision"] != "float64" else power


def _adam_decay(s: Setting, step: Value) -> tuple[Value, Value]:
    beta2 = s.xp.constant(_given(s.hyper.beta2, "beta2"))
    before = s.xp.exponential(beta2, s.xp.widen(step))
    decay = beta2 * (1.0 - before) / (1.0 - s.xp.exponential(beta2, s.xp.widen(step) + 1.0))
    return decay, 1.0 - decay


def _given_decay(s: Setting, step: Value) -> tuple[Value, Value]:
    decay = s.xp.widen(_given(s.hyper.second_moment_decay, "second_moment_decay"))
    return decay, 1.0 - decay


def _given(value: float | None, name: str) -> float:
    if value is None:
        raise UnknownRuleError("The step needs a hyperparameter that is not given.", expected=name)
    return value


DECAY: Mapping[str, Callable[[Setting, Value], tuple[Value, Value]]] = {
    "pow": _pow_decay,
    "adam": _adam_decay,
    "given": _given_decay,
}


def _rsqrt_rate(s: Setting, rate: Value | None, step: Value) -> Value:
    if rate is not None:
        return rate
    relative = s.xp.minimum(s.xp.power(s.xp.widen(step) + 1.0, -0.5), s.xp.constant(0.01))
    unscaled = s.form["lr_default_unscaled_factor"]
    factor = 1.0 if s.hyper.own_rate_scaled or unscaled == "none" else unscaled
    return relative * s.xp.constant(factor)


def _relative_rate(s: Setting, rate: Value | None, step: Value) -> Value:
    if not s.hyper.relative_step:
        return _needed(rate)
    t = s.xp.widen(step) + 1.0
    most = t * s.xp.constant(1e-6) if s.hyper.warmup_init else s.xp.constant(1e-2)
    return s.xp.minimum(1.0 / s.xp.sqrt(t), most)


def _capped_rate(s: Setting, rate: Value | None, step: Value) -> Value:
    return s.xp.minimum(_needed(rate), 1.0 / s.xp.sqrt(s.xp.widen(step) + 1.0))


def _needed(rate: Value | None) -> Value:
    if rate is None:
        raise UnknownRuleError("The step needs a learning rate.", expected="learning_rate")
    return rate


LEARNING_RATE: Mapping[str, Callable[[Setting, Value | None, Value], Value]] = {
    "given": lambda s, rate, step: _needed(rate),
    "given_or_rsqrt": _rsqrt_rate,
    "given_or_relative": _relative_rate,
    "given_or_relative_compounding": _relative_rate,
    "given_capped": _capped_rate,
}


def _norm_over_root(s: Setting, value: Value, over: str) -> Value:
    count = math.prod(s.xp.shape(value)[i] for i in s.averaged(over))
    norm = s.returned(s.xp.sqrt(s.mean_over(value * value, over) * s.xp.constant(count)))
    return norm / s.xp.constant(math.sqrt(count))


ROOT_MEAN_SQUARE: Mapping[str, Callable[[Setting, Value, str], Value]] = {
    "root_of_mean": lambda s, value, over: s.xp.sqrt(s.mean_over(value * value, over)),
    "norm_over_root": _norm_over_root,
}


def root_mean_square(s: Setting, value: Value, over: str) -> Value:
    """Returns the root mean square over the `tensor`, or else over all axes that aren't BATCH; they stay as 1."""
    return ROOT_MEAN_SQUARE[s.form["rms_form"]](s, value, over)


def _parameter_precision(s: Setting, p: Value) -> tuple[Value, str]:
    # A compiler keeps the product in float32, but what leaves a reduction has the parameter's dtype in both executions
    # (recorded: golden t5x/bf16_params, trajectory and trajectory_jit).
    mean = s.xp.rounded(s.mean_over(s.product(p * p, s.dtype), s.form["parameter_scale_over"]), s.dtype)
    return s.xp.rounded(s.xp.sqrt(mean), s.dtype), s.dtype


def _float32_precision(s: Setting, p: Value) -> tuple[Value, str]:
    return root_mean_square(s, p, s.form["parameter_scale_over"]), "float32"


def _sequential_precision(s: Setting, p: Value) -> tuple[Value, str]:
    total = s.xp.sequential_sum(s.xp.rounded(p * p, s.dtype), s.dtype)
    count = 1.0
    for size in s.xp.shape(p):
        count *= size
    mean = s.xp.rounded(total / s.xp.constant(count, s.dtype), s.dtype)
    return s.xp.rounded(s.xp.sqrt(mean), s.dtype), s.dtype


RMS: Mapping[str, Callable[[Setting, Value], tuple[Value, str]]] = {
    "parameter": _parameter_precision,
    "parameter_sequential": _sequential_precision,
    "float32": _float32_precision,
    "norm_then_float64": _float32_precision,
}


def at_least(s: Setting, norm: Value, limit: float) -> Value:
    """Returns a root mean square, but at least a limit."""
    return AT_LEAST[s.form["nan_norm"]](s, norm, limit)


AT_LEAST: Mapping[str, Callable[[Setting, Value, float], Value]] = {
    "spreads": lambda s, norm, limit: s.xp.maximum(norm, limit),
    "limit": lambda s, norm, limit: s.xp.if_greater(norm, limit, norm, limit),
}


def parameter_scale(s: Setting, p: Value) -> Value | None:
    """Returns the root mean square of the parameter between its floor and its ceiling; None where it's off."""
    if s.form["parameter_scale"] == "option" and not s.hyper.multiply_by_parameter_scale:
        return None
    read = (
        s.xp.rounded(p, s.hyper.activation_dtype)
        if s.form["parameter_scale_reads"] == "activation_copy"
        else p
    )
    rms, dtype = RMS[s.form["parameter_scale_precision"]](s, read)
    scale = at_least(s, rms, s.xp.constant(s.hyper.epsilon2, dtype))
    if s.hyper.max_parameter_scale is not None:
        scale = s.xp.minimum(scale, s.xp.constant(s.hyper.max_parameter_scale, dtype))
    return scale


SQUARE: Mapping[str, Callable[[Setting, Value], Value]] = {
    "added_to_square": lambda s, square: square + s.xp.constant(s.epsilon1),
    "clamp": lambda s, square: s.returned(square),
}
"""What the second moment averages, of the gradient's square, by `epsilon1_place`: with epsilon1, or without."""


def _squared_norm(s: Setting, q: Value, axes: tuple[int, ...]) -> Value:
    count = s.xp.constant(math.prod(s.xp.shape(q)[i] for i in axes))
    norm = s.returned(s.xp.sqrt(s.xp.mean(q, axes) * count))
    return s.returned(s.returned(norm * norm) / count)


MEAN: Mapping[str, Callable[[Setting, Value, Value, tuple[int, ...]], Value]] = {
    "mean_of_squares": lambda s, g, q, axes: s.xp.mean(q, axes),
    "squared_norm": lambda s, g, q, axes: _squared_norm(s, g * g, axes),
}
"""What v_row and v_col average, of a gradient g and its square q."""

BLEND: Mapping[str, Callable[[Setting, Value, Value, Value, Value], Value]] = {
    "weighted_sum": lambda s, old, new, decay, mix: decay * old + mix * new,
    "lerp": lambda s, old, new, decay, mix: s.returned(s.xp.lerp(old, new, mix)),
}

NORMALISER: Mapping[str, Callable[[Setting, Value], Value]] = {
    "mean": lambda s, mean: mean,
    "clamped_mean": lambda s, mean: s.xp.maximum(s.returned(mean), s.constant(s.epsilon1)),
}


def _estimate(s: Setting, row: Value, column: Value, mean: Value) -> Value:
    return s.returned(s.returned(row * column) / mean)


def _clamped_rsqrt(s: Setting, v: Value) -> Value:
    clamped = s.xp.maximum(v, s.constant(s.epsilon1**2))
    return s.returned(
        s.xp.either(lambda: s.xp.power(clamped, -0.5), lambda: 1.0 / s.returned(s.xp.sqrt(clamped)))
    )


FACTORED: Mapping[str, Callable[[Setting, Value, Value, Value, Value], Value]] = {
    "powers": lambda s, g, row, col, mean: g * s.xp.power(row / mean, -0.5) * s.xp.power(col, -0.5),
    "rsqrts": lambda s, g, row, col, mean: g * s.xp.power(row / mean, -0.5) * s.xp.power(col, -0.5),
    "rsqrts_first": lambda s, g, row, col, mean: s.xp.power(row / mean, -0.5) * s.xp.power(col, -0.5) * g,
    "estimate_rsqrt": lambda s, g, row, col, mean: s.returned(
        _clamped_rsqrt(s, _estimate(s, row, col, mean)) * g
    ),
    "estimate_sqrt": lambda s, g, row, col, mean: g / s.xp.sqrt(row / mean * col),
}

UNFACTORED: Mapping[str, Callable[[Setting, Value, Value], Value]] = {
    "powers": lambda s, g, v: g * s.xp.power(v, -0.5),
    "rsqrts": lambda s, g, v: g * s.xp.power(v, -0.5),
    "rsqrts_first": lambda s, g, v: s.xp.power(v, -0.5) * g,
    "estimate_rsqrt": lambda s, g, v: s.returned(_clamped_rsqrt(s, v) * g),
    "estimate_sqrt": lambda s, g, v: g / s.xp.sqrt(v),
}


CLIP: Mapping[str, Callable[[Value, Value, Value], tuple[Value, Value]]] = {
    "gradient": lambda scale, y, factor: (scale, y / factor),
    "step_size": lambda scale, y, factor: (scale / factor, y),
}
"""Step size and preconditioned gradient after clipping."""

STEP_PRODUCT: Mapping[str, Callable[[Setting, Value, Value, Value, Value | None], Value]] = {
    "size_first": lambda s, size, y, rate, scale: size * y,
    "rate_first": lambda s, size, y, rate, scale: _by_rate_and_scale(s, y, rate, scale),
}
"""The step: step size and preconditioned gradient after clipping, learning rate, parameter scale (None without)."""


def _by_rate_and_scale(s: Setting, y: Value, rate: Value, scale: Value | None) -> Value:
    u = y * s.xp.cast(rate, s.xp.dtype(y))
    return u if scale is None else u * scale


MOMENTUM_PRODUCT: Mapping[str, Callable[[Setting, Value], Value]] = {
    "rounded_op_by_op": lambda s, value: s.product(value, s.momentum_dtype),
    "rounded": lambda s, value: s.xp.rounded(value, s.momentum_dtype),
    "float32": lambda s, value: value,
}


def weight_decay(s: Setting, rate: Value | None, step_size: Value) -> Value | float | None:
    """Returns the factor of weight decay in this update; None if it is off."""
    w, exponent = s.hyper.weight_decay_rate, s.hyper.weight_decay_rate_lr_exponent
    if exponent:  # T5X tests for truth: a rate of 0 counts as 1 here, and an exponent of 0 as none
        return s.xp.power(_needed(rate), s.xp.constant(exponent)) * s.xp.constant(w or 1.0)
    if w is None or s.form["weight_decay_form"] == "absent":
        return None
    form = s.form["weight_decay_form"]
    return (
        w if form in ("none", "power") else (_needed(rate) if form == "lr" else step_size) * s.xp.constant(w)
    )


def _kept(s: Setting, p: Value, w: Value | float) -> Value:
    if isinstance(w, float | int):
        return s.product(p * s.xp.constant(1.0 - w, s.dtype), s.dtype)
    return (1.0 - w) * p


DECAYED: Mapping[str, Callable[[Setting, Value, Any], Value]] = {
    "product": _kept,
    "product_first": lambda s, p, w: s.returned(
        s.xp.either(lambda: (1.0 - w) * p, lambda: s.returned(1.0 - w) * p)
    ),
    "subtract_first": lambda s, p, w: p - p * w,
    "subtract_twice": lambda s, p, w: p - p * w,
}
"""The parameter after weight decay, where it is decayed by itself."""


def _fused(s: Setting, p: Value, u: Value, size: Value, y: Value) -> Value:
    product = (s.returned(size) if s.rounds_added else size) * y
    return s.xp.either(lambda: p - product, lambda: p - s.returned(product))


UPDATE: Mapping[str, Callable[[Setting, Value, Value, Value, Value], Value]] = {
    "subtract": lambda s, p, u, size, y: p - u,
    "fused": _fused,
}
"""The parameter after a step u, which without momentum is size * y."""


def applied(s: Setting, p: Value, u: Value, size: Value, y: Value, w: Value | float | None) -> Value:
    """Returns the parameter after the weight decay that comes last, and the step."""
    if w is None:
        return UPDATE[s.form["update_form"]](s, p, u, size, y)
    if s.form["weight_decay_expression"] == "sum":
        return p - (u + p * w)
    return DECAYED[s.form["weight_decay_expression"]](s, p, w) - u


_PHI = (math.sqrt(5.0) - 1.0) / 2.0
_BITS = 30


class Storage(Protocol):
    """One way to keep a parameter."""

    def decode(self, s: Setting, stored: Value) -> Value:
        """Returns the parameter's value in the compute dtype."""

    def encode(self, s: Setting, value: Value, step: Value) -> Value:
        """Returns what is stored of a new value; `step` updates were done before this one."""


class Nearest:
    """Rounded to nearest even."""

    def decode(self, s: Setting, stored: Value) -> Value:
        return s.xp.widen(stored)

    def encode(self, s: Setting, value: Value, step: Value) -> Value:
        return s.xp.narrow(value, s.dtype)


class Unbiased:
    """Quantized if asked for; bfloat16 is rounded up or down by the step's noise."""

    def decode(self, s: Setting, stored: Value) -> Value:
        return s.xp.widen(stored)

    def encode(self, s: Setting, value: Value, step: Value) -> Value:
        if s.hyper.simulated_quantize_bits and len(s.xp.shape(value)) >= 2 and s.xp.shape(value)[-1] > 1:
            value = _quantized(s, value, s.hyper.simulated_quantize_bits, step)
        if s.dtype != "bfloat16":
            return s.xp.narrow(value, s.dtype)
        return s.xp.narrow(_rounded_with_noise(s, value, noise(s, step)), "bfloat16")


class EighthPower(Unbiased):
    """Bfloat16 holds sign(w) (128 |w|)^8, rounded with noise; other dtypes hold the value."""

    def decode(self, s: Setting, stored: Value) -> Value:
        if s.dtype != "bfloat16":
            return s.xp.widen(stored)
        root = s.xp.absolute(s.xp.widen(stored))
        for _ in range(3):
            root = s.xp.sqrt(root)
        return s.xp.sign(s.xp.widen(stored)) * root * (1.0 / 128.0)

    def encode(self, s: Setting, value: Value, step: Value) -> Value:
        if s.dtype != "bfloat16":
            return super().encode(s, value, step)
        power = s.xp.absolute(value) * 128.0
        for _ in range(3):
            power = power * power
        return super().encode(s, s.xp.sign(value) * power, step)


def noise(s: Setting, step: Value) -> Value:
    """Returns the number in [0, 1) that an update rounds with, a function of its step alone.

    Bit i of step+1 adds frac(phi 2^i), phi the golden ratio's inverse; the sum, in float32, is taken mod 1. It may run
    in any order: TensorFlow's graph makes a chain of additions one (Grappler, `AddOpsRewriteStage`).
    """
    fractions = [float(np.float32(math.fmod(_PHI * 2.0**bit, 1.0))) for bit in range(_BITS)]
    bits = [s.xp.widen((step + 1) // 2**bit % 2) for bit in range(_BITS)]
    total = s.xp.sum(*(bit * fraction for bit, fraction in zip(bits, fractions, strict=True)))
    return total - s.xp.floor(total)


def _rounded_with_noise(s: Setting, value: Value, level: Value) -> Value:
    xp = s.xp
    size = xp.absolute(value) + xp.constant(1e-30)
    near = xp.rounded(size, "bfloat16")
    above = xp.rounded(near * xp.constant(1.005), "bfloat16")
    below = xp.rounded(near * xp.constant(0.995), "bfloat16")
    far = xp.if_greater(size, near, above, below)
    fraction = (size - near) / (far - near)
    return xp.if_greater(fraction, level, far, near) * xp.sign(value)


def _quantized(s: Setting, value: Value, bits: int, step: Value) -> Value:
    last = len(s.xp.shape(value)) - 1
    most = s.xp.largest(s.xp.absolute(value), last)
    unit = (most + s.xp.constant(1e-9)) / s.xp.constant(2.0 ** (bits - 1) - 1)
    return s.xp.floor(value / unit + noise(s, step)) * unit


STORAGE: Mapping[str, Storage] = {
    "nearest": Nearest(),
    "slice": Nearest(),
    "unbiased": Unbiased(),
    "eighth_power": EighthPower(),
}
