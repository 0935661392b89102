"""The optimizers; `statekit.tensorflow.optimizer.Engine` has their arguments, `statekit schemas` their options."""

from __future__ import annotations

import keras

from statekit.tensorflow.optimizer import Engine

_registered = keras.saving.register_keras_serializable(package="statekit")


@_registered
class Adafactor(Engine):
    """Adafactor (Shazeer and Stern 2018) as T5X has it, or as another `variant` of its schema.

    Slots: `v_row` and `v_col`, or `v`; with momentum `m`. The learning rate is the one before parameter scale.

    Example:
        >>> optimizer = Adafactor(1e-3, beta1=0.9)
        >>> weight = keras.Variable([[1.0, 2.0], [3.0, 4.0]], name="weight")
        >>> optimizer.build([weight])
        >>> sorted(optimizer.slots()["weight"])
        ['m', 'v']
    """

    SCHEMA, USUAL = "adafactor", "t5x"


@_registered
class ScaledAdam(Engine):
    """ScaledAdam (Yao et al. 2023) as icefall has it today, or as another generation.

    Slots: `delta`, `exp_avg_sq`, `param_rms`, `scale_exp_avg_sq`, `scale_grads`; with clipping, of each group as a
    whole, `model_norms`, `model_norm_threshold`, `num_clipped`.
    """

    SCHEMA, USUAL = "scaled_adam", "zip2025"


@_registered
class LANS(Engine):
    """LANS (Zheng et al. 2020) as MXNet has it fused, or as another variant. Slots: `m`, `v`; `master` of float16."""

    SCHEMA, USUAL = "lans", "mxnet_fused"


@_registered
class LAMB(Engine):
    """LAMB (You et al. 2019) as Keras has it, or as another variant. Slots: `m`, `v`."""

    SCHEMA, USUAL = "lamb", "keras"


@_registered
class AdamW(Engine):
    """AdamW (Loshchilov and Hutter 2017) as Keras has it, or as another variant.

    Slots: `m`, `v`; with amsgrad `v_max`.
    """

    SCHEMA, USUAL = "adamw", "keras"
