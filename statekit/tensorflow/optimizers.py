"""The optimizers; `statekit.tensorflow.optimizer.SchemaOptimizer` has their common arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import keras

from statekit.dropin.options import (
    AdafactorOptions,
    AdamWOptions,
    LambOptions,
    LansOptions,
    MuonOptions,
    ScaledAdamOptions,
    documented,
)
from statekit.tensorflow.optimizer import Rate, SchemaOptimizer

ARGUMENTS = """
Args:
    learning_rate: A number, a Keras schedule (of `iterations`), a callable without arguments, or None.
    variant: Whose rule: {variants}. Default: {usual}.
    {options}
"""
"""What all take, as their docstrings have it."""
_registered = keras.saving.register_keras_serializable(package="statekit")


class _Common(TypedDict, total=False):
    """What all take beside the learning rate and their options."""

    variant: str | None
    groups: Sequence[Mapping[str, Any]]
    rules: Mapping[str, Mapping[str, Any]] | None
    names: Mapping[str, str] | None
    missed: Mapping[str, int] | None
    jit_compile: bool
    name: str | None


class _KerasOptions(TypedDict, total=False):
    """What Keras' base class takes, for optimizers that Keras hasn't."""

    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    loss_scale_factor: float | None
    gradient_accumulation_steps: int | None


class _AdafactorArguments(_Common, AdafactorOptions):
    pass


@documented("adafactor", "t5x", ARGUMENTS)
@_registered
class Adafactor(SchemaOptimizer):
    """Adafactor (Shazeer and Stern 2018) as T5X has it, or as another `variant` of its schema.

    Slots: `v_row` and `v_col`, or `v`; with momentum `m`. The learning rate is the one before parameter scale.

    {arguments}

    Example:
        >>> optimizer = Adafactor(1e-3, beta1=0.9)
        >>> weight = keras.Variable([[1.0, 2.0], [3.0, 4.0]], name="weight")
        >>> optimizer.build([weight])
        >>> sorted(optimizer.slots()["weight"])
        ['m', 'v']
    """

    SCHEMA, USUAL = "adafactor", "t5x"

    def __init__(self, learning_rate: Rate = None, **arguments: Unpack[_AdafactorArguments]) -> None:
        super().__init__(learning_rate, **arguments)


class _ScaledAdamArguments(_Common, _KerasOptions, ScaledAdamOptions):
    pass


@documented("scaled_adam", "zip2025", ARGUMENTS)
@_registered
class ScaledAdam(SchemaOptimizer):
    """ScaledAdam (Yao et al. 2023) as icefall has it today, or as another generation.

    Slots: `delta`, `exp_avg_sq`, `param_rms`, `scale_exp_avg_sq`, `scale_grads`; with clipping, of each group as a
    whole, `model_norms`, `model_norm_threshold`, `num_clipped`.

    {arguments}
    """

    SCHEMA, USUAL = "scaled_adam", "zip2025"

    def __init__(self, learning_rate: Rate = None, **arguments: Unpack[_ScaledAdamArguments]) -> None:
        super().__init__(learning_rate, **arguments)


class _LANSArguments(_Common, _KerasOptions, LansOptions):
    pass


@documented("lans", "mxnet_fused", ARGUMENTS)
@_registered
class LANS(SchemaOptimizer):
    """LANS (Zheng et al. 2020) as MXNet has it fused, or as another variant. Slots: `m`, `v`; `master` of float16.

    {arguments}
    """

    SCHEMA, USUAL = "lans", "mxnet_fused"

    def __init__(self, learning_rate: Rate = None, **arguments: Unpack[_LANSArguments]) -> None:
        super().__init__(learning_rate, **arguments)


class _LAMBArguments(_Common, LambOptions):
    pass


@documented("lamb", "keras", ARGUMENTS)
@_registered
class LAMB(SchemaOptimizer):
    """LAMB (You et al. 2019) as Keras has it, or as another variant. Slots: `m`, `v`.

    {arguments}
    """

    SCHEMA, USUAL = "lamb", "keras"

    def __init__(self, learning_rate: Rate = None, **arguments: Unpack[_LAMBArguments]) -> None:
        super().__init__(learning_rate, **arguments)


class _AdamWArguments(_Common, AdamWOptions):
    pass


@documented("adamw", "keras", ARGUMENTS)
@_registered
class AdamW(SchemaOptimizer):
    """AdamW (Loshchilov and Hutter 2017) as Keras has it, or as another variant.

    Slots: `m`, `v`; with amsgrad `v_max`.

    {arguments}
    """

    SCHEMA, USUAL = "adamw", "keras"

    def __init__(self, learning_rate: Rate = None, **arguments: Unpack[_AdamWArguments]) -> None:
        super().__init__(learning_rate, **arguments)


class _MuonArguments(_Common, MuonOptions):
    pass


@documented("muon", "keras", ARGUMENTS)
@_registered
class Muon(SchemaOptimizer):
    """Muon (Jordan et al. 2024) as Keras has it, or as another variant, for variables that are matrices.

    Slots: `m`.

    {arguments}
    """

    SCHEMA, USUAL = "muon", "keras"

    def __init__(self, learning_rate: Rate = None, **arguments: Unpack[_MuonArguments]) -> None:
        super().__init__(learning_rate, **arguments)
