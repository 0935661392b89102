"""How Adafactors keep a parameter: rounded, rounded with noise, or encoded, and quantized on the way if asked.

Source: tensor2tensor/utils/quantization.py (1.5.6 to 1.15.7), tensor2tensor/utils/adafactor.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from statekit.arrays.backend import Value
from statekit.optim.adafactor_forms import Setting

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
    above, below = (
        xp.rounded(near * xp.constant(1.005), "bfloat16"),
        xp.rounded(near * xp.constant(0.995), "bfloat16"),
    )
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
