"""The optimizers, as functions that return an `optax.GradientTransformation`.

Each follows the rule of one `variant`; options have canonical names and are those of the variant, as
`schemas/<optimizer>.json` explains them; what isn't given is as the variant has it. Numbers may be arrays, e.g. under
`optax.inject_hyperparams`, where they don't decide shapes. `updates` are float32 or wider: `optax.apply_updates` rounds
parameters of low precision once, to what the rule makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optax

from statekit.dropin.by_name import UNSET, Unset, given
from statekit.jax.transformation import Rate, transformation


def adafactor(
    learning_rate: Rate = None,
    *,
    variant: str = "t5x",
    beta1: float | Unset | None = UNSET,
    decay_rate: float | Unset = UNSET,
    decay_type: str | Unset = UNSET,
    beta2: float | Unset | None = UNSET,
    second_moment_decay: float | Unset | None = UNSET,
    step_offset: int | Unset = UNSET,
    clipping_threshold: float | Unset | None = UNSET,
    weight_decay_rate: float | Unset | None = UNSET,
    weight_decay_rate_lr_exponent: float | Unset | None = UNSET,
    exclude_from_weight_decay: Sequence[str] | Mapping[str, bool] | Unset | None = UNSET,
    multiply_by_parameter_scale: bool | Mapping[str, bool] | Sequence[tuple[str, bool]] | Unset = UNSET,
    exclude_from_parameter_scale: Sequence[str] | Unset | None = UNSET,
    min_dim_size_to_factor: int | Unset = UNSET,
    factored: bool | Unset = UNSET,
    epsilon1: float | Unset | None = UNSET,
    epsilon2: float | Unset = UNSET,
    dtype_momentum: str | Unset = UNSET,
    factor_map: Mapping[str, Any] | Sequence[tuple[str, Any]] | Unset | None = UNSET,
    global_norm_clip_threshold: float | Unset | None = UNSET,
    clipnorm: float | Unset | None = UNSET,
    clipvalue: float | Unset | None = UNSET,
    loss_scale_factor: float | Unset | None = UNSET,
    max_parameter_scale: float | Unset | None = UNSET,
    skip_nan_updates: bool | Unset = UNSET,
    relative_step: bool | Unset = UNSET,
    warmup_init: bool | Unset = UNSET,
    maximize: bool | Unset = UNSET,
    simulated_quantize_bits: int | Unset | None = UNSET,
    parameter_encoding: str | Unset | None = UNSET,
    stacked_dim_names: Sequence[str] | Unset | None = UNSET,
    activation_dtype: str | Unset = UNSET,
    use_ema: bool | Unset = UNSET,
    ema_momentum: float | Unset | None = UNSET,
    ema_overwrite_frequency: int | Unset | None = UNSET,
) -> optax.GradientTransformation:
    """Adafactor as one of its implementations has it; by default T5X's. Its state is an AdafactorState.

    The learning rate is the one before parameter scale: with `multiply_by_parameter_scale` steps are relative to the
    size of the parameter, without it they are absolute. T5X's usual schedule is
    `lambda n: jnp.maximum(n, 10_000) ** -0.5`.

    Args:
        learning_rate: A number, a 0-d array, a schedule of the updates done, or None: then every update raises,
            but for variants that have a rate of their own (t2t_early, t2t_late, mesh_tf; hf and fairseq with
            `relative_step`).
        variant: Whose rule: t5x, t2t_early, t2t_late, mesh_tf, hf, fairseq, torch, optax or keras.
        beta1: Decay of the momentum; None for none.
        decay_rate: Exponent of the second moment's decay, 1 - t^-decay_rate.
        decay_type: `pow`, `adam` or `given`: how that decay follows from the count.
        beta2: Second-moment decay of decay_type `adam`.
        second_moment_decay: Second-moment decay of decay_type `given`.
        step_offset: The count at which the decay starts again.
        clipping_threshold: Largest root mean square of a parameter's preconditioned gradient; None for no clipping.
        weight_decay_rate: What every update takes off the parameter; in T5X not scaled by the learning rate.
        weight_decay_rate_lr_exponent: Exponent of the learning rate that the weight decay is multiplied with.
        exclude_from_weight_decay: Regexes of parameters that aren't decayed, searched in the path (slashes for dots);
            in optax's variant also {name: bool}.
        multiply_by_parameter_scale: Whether steps are relative: one bool, or by name, as {name: bool} or
            [(regex, bool), ...].
        exclude_from_parameter_scale: Parts of paths of parameters whose steps are absolute.
        min_dim_size_to_factor: The smallest second-largest axis of a matrix that is factored.
        factored: Whether second moments are factored at all.
        epsilon1: What is added to squared gradients; None: machine epsilon of the parameter's dtype.
        epsilon2: Floor of the parameter scale.
        dtype_momentum: Dtype of `m`, by name.
        factor_map: Which axes are factored: [(regex, labels), ...], where the first regex found in the name counts and
            must be there, or {name: labels}. Labels are one of ROW, COLUMN, BATCH, NONE per axis, or "HEURISTIC".
            In T5X's variant labels without BATCH are ignored in favour of the heuristic for rank 0 to 2, and rank 3
            and more need some; in the others they outweigh what the shape says.
        global_norm_clip_threshold: Largest norm of all gradients of a group together.
        clipnorm: Largest norm of each gradient.
        clipvalue: Largest absolute value of each element of a gradient.
        loss_scale_factor: What gradients are divided by first.
        max_parameter_scale: Ceiling of the parameter scale.
        skip_nan_updates: Whether elements that would become NaN keep their value.
        relative_step: Whether the learning rate follows from the count.
        warmup_init: Whether that rate starts small.
        maximize: Whether the gradient's sign is turned.
        simulated_quantize_bits: Bits of simulated quantization of the parameters.
        parameter_encoding: How bfloat16 parameters hold their value: `eighth_power`, or None for as they are.
        stacked_dim_names: Names of axes that are kept apart; here `factor_map` says which axes these are.
        activation_dtype: Dtype of the copy that the parameter scale reads.
        use_ema: Whether an average of the parameters is kept, in the slot `average`.
        ema_momentum: Decay of that average.
        ema_overwrite_frequency: Updates after which averages replace the parameters.

    Raises:
        NotFoundError: There is no such variant.
        StateError: The variant can't be stepped.
        UsageError: Options that can't be; lists every one.

    Source: T5X t5x/adafactor.py, `Adafactor`; of the other variants the sources in schemas/adafactor.json.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"kernel": jnp.ones((256, 128)), "bias": jnp.ones(128)}
        >>> state = adafactor(1e-2).init(params)
        >>> state.v_row["kernel"].shape, state.v["kernel"], state.v["bias"].shape
        ((128,), MaskedNode(), (128,))
    """
    return transformation("adafactor", variant, learning_rate, given(locals()))


def scaled_adam(
    learning_rate: Rate = None,
    *,
    variant: str = "zip2025",
    clipping_scale: float | Unset | None = UNSET,
    betas: tuple[float, float] | Unset = UNSET,
    scalar_lr_scale: float | Unset = UNSET,
    eps: float | Unset = UNSET,
    param_min_rms: float | Unset = UNSET,
    param_max_rms: float | Unset = UNSET,
    scalar_max: float | Unset = UNSET,
    size_update_period: int | Unset = UNSET,
    clipping_update_period: int | Unset = UNSET,
) -> optax.GradientTransformation:
    """One of the generations of icefall's ScaledAdam; by default the newest. Its state is a ScaledAdamState.

    Args:
        learning_rate: A number, a 0-d array, a schedule of the updates done, or None: then every update raises.
        variant: Whose rule: gptsovits, pt7, zip202305, zip202310, zip202407 or zip2025. States look alike in all.
        clipping_scale: Largest norm of a group's gradients, as a multiple of the median of recent norms; None for no
            clipping.
        betas: Decay of the momentum, and of the second moment.
        scalar_lr_scale: Factor of the learning rate for one-element parameters and for the size update.
        eps: What is added to roots before they divide.
        param_min_rms: Smallest root mean square that steps are scaled by.
        param_max_rms: Largest root mean square that the size update aims at.
        scalar_max: Largest absolute value of a one-element parameter.
        size_update_period: Updates between two updates of a parameter's size.
        clipping_update_period: Updates between two estimates of the threshold.

    Raises:
        NotFoundError: There is no such variant.
        StateError: The variant can't be stepped.
        UsageError: Options that can't be; lists every one.

    Source: k2-fsa/icefall, egs/librispeech/ASR/zipformer/optim.py, `ScaledAdam`; of the other variants the sources in
    schemas/scaled_adam.json.

    Example:
        >>> import jax.numpy as jnp
        >>> scaled_adam(0.03, clipping_scale=2.0).init({"kernel": jnp.ones((4, 3))}).model_norms.shape
        (100,)
    """
    return transformation("scaled_adam", variant, learning_rate, given(locals()))


def lans(
    learning_rate: Rate = None,
    *,
    variant: str = "mxnet_fused",
    beta1: float | Unset = UNSET,
    beta2: float | Unset = UNSET,
    epsilon: float | Unset = UNSET,
    wd: float | Unset = UNSET,
    lower_bound: float | Unset | None = UNSET,
    upper_bound: float | Unset | None = UNSET,
    clip_gradient: float | Unset | None = UNSET,
    rescale_grad: float | Unset = UNSET,
    lr_mult: Mapping[str, float] | Unset = UNSET,
    wd_mult: Mapping[str, float] | Unset = UNSET,
    multi_precision: bool | Unset = UNSET,
    begin_num_update: int | Unset = UNSET,
    bias_correction: bool | Unset = UNSET,
    grad_averaging: bool | Unset = UNSET,
    normalize_grad: bool | Unset = UNSET,
    adam_w_mode: bool | Unset = UNSET,
) -> optax.GradientTransformation:
    """LANS (Zheng et al. 2020): LAMB with Nesterov's momentum, each gradient normalised. Its state is a LansState.

    The paper's variant has no defaults: give it `beta1`, `beta2`, `epsilon` and `wd`.

    Args:
        learning_rate: A number, a 0-d array, a schedule of the updates done, or None: then every update raises.
        variant: Whose rule: mxnet_fused, mxnet_unfused, mxnet_gpu, paper or apex_fused. States look alike in all.
        beta1: Decay of the first moment, and weight of the first half of the update.
        beta2: Decay of the second moment.
        epsilon: What is added to the root of the second moment.
        wd: Weight decay.
        lower_bound: Smallest weight norm in the trust ratios; None for none.
        upper_bound: Largest weight norm in the trust ratios; None for none.
        clip_gradient: Largest absolute value of an element of the normalised gradient; None for none.
        rescale_grad: Factor of gradients before anything else.
        lr_mult: Factors of the learning rate, {name: number}.
        wd_mult: Factors of the weight decay, {name: number}.
        multi_precision: Whether float16 parameters have a float32 master.
        begin_num_update: Count that every parameter starts from.
        bias_correction: Whether moments are corrected for their zero start.
        grad_averaging: Whether a gradient enters the first moment with 1 - beta1 instead of 1.
        normalize_grad: Whether gradients are divided by their norm.
        adam_w_mode: Whether weight decay is added to the direction instead of to the gradient.

    Raises:
        NotFoundError: There is no such variant.
        StateError: The variant can't be stepped.
        UsageError: Options that can't be; lists every one.

    Source: arXiv 2006.13484, algorithm 2; apache/mxnet, src/operator/contrib/multi_lans.cc and
    python/mxnet/optimizer/lans.py; of the other variants the sources in schemas/lans.json.
    """
    return transformation("lans", variant, learning_rate, given(locals()))


def lamb(
    learning_rate: Rate = None,
    *,
    variant: str = "optax",
    beta1: float | Unset = UNSET,
    beta2: float | Unset = UNSET,
    epsilon: float | Unset = UNSET,
    epsilon_root: float | Unset = UNSET,
    weight_decay_rate: float | Unset | None = UNSET,
    exclude_from_weight_decay: Sequence[str] | Mapping[str, bool] | Unset | None = UNSET,
    global_norm_clip_threshold: float | Unset | None = UNSET,
    clipnorm: float | Unset | None = UNSET,
    clipvalue: float | Unset | None = UNSET,
    loss_scale_factor: float | Unset | None = UNSET,
    use_ema: bool | Unset = UNSET,
    ema_momentum: float | Unset | None = UNSET,
    ema_overwrite_frequency: int | Unset | None = UNSET,
) -> optax.GradientTransformation:
    """LAMB (You et al. 2019) as Optax or Keras has it. Its state is a LambState.

    Args:
        learning_rate: A number, a 0-d array, a schedule of the updates done, or None: then every update raises.
        variant: Whose rule: optax or keras.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: What is added to the root of the second moment.
        epsilon_root: What is added inside that root.
        weight_decay_rate: Weight decay; None for none.
        exclude_from_weight_decay: Regexes of parameters that aren't decayed: searched in the path (slashes for dots),
            in Keras' variant in its last part; in Optax's also {name: bool}.
        global_norm_clip_threshold: Largest norm of all gradients of a group together.
        clipnorm: Largest norm of each gradient.
        clipvalue: Largest absolute value of each element of a gradient.
        loss_scale_factor: What gradients are divided by first.
        use_ema: Whether an average of the parameters is kept.
        ema_momentum: Decay of that average.
        ema_overwrite_frequency: Updates after which averages replace the parameters.

    Raises:
        NotFoundError: There is no such variant.
        StateError: The variant can't be stepped.
        UsageError: Options that can't be; lists every one.

    Source: google-deepmind/optax, optax/_src/alias.py, `lamb`; keras-team/keras, keras/src/optimizers/lamb.py.
    """
    return transformation("lamb", variant, learning_rate, given(locals()))


def adamw(
    learning_rate: Rate = None,
    *,
    variant: str = "optax",
    beta1: float | Unset = UNSET,
    beta2: float | Unset = UNSET,
    epsilon: float | Unset = UNSET,
    epsilon_root: float | Unset = UNSET,
    weight_decay_rate: float | Unset | None = UNSET,
    exclude_from_weight_decay: Sequence[str] | Mapping[str, bool] | Unset | None = UNSET,
    amsgrad: bool | Unset = UNSET,
    nesterov: bool | Unset = UNSET,
    dtype_momentum: str | Unset | None = UNSET,
    decoupled_weight_decay: bool | Unset = UNSET,
    maximize: bool | Unset = UNSET,
    global_norm_clip_threshold: float | Unset | None = UNSET,
    clipnorm: float | Unset | None = UNSET,
    clipvalue: float | Unset | None = UNSET,
    loss_scale_factor: float | Unset | None = UNSET,
    use_ema: bool | Unset = UNSET,
    ema_momentum: float | Unset | None = UNSET,
    ema_overwrite_frequency: int | Unset | None = UNSET,
) -> optax.GradientTransformation:
    """AdamW as Optax, PyTorch, Keras, Mesh-TensorFlow or GPT-Neo has it; by default Optax'. Its state is an AdamWState.

    Args:
        learning_rate: A number, a 0-d array, a schedule of the updates done, or None: then every update raises.
        variant: Whose rule: torch, optax, keras, mesh_tf or gpt_neo.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: What is added to the root of the second moment.
        epsilon_root: What is added inside that root.
        weight_decay_rate: Weight decay, multiplied by the learning rate; None for none.
        exclude_from_weight_decay: Regexes of parameters that aren't decayed: searched in the path (slashes for dots),
            in Keras' variant in its last part; in Optax's also {name: bool}.
        amsgrad: Whether the largest second moment so far divides.
        nesterov: Whether the first moment is corrected one step ahead.
        dtype_momentum: Dtype of `m`, by name; None: the parameter's.
        decoupled_weight_decay: True; what isn't decoupled is no AdamW and can't be stepped.
        maximize: Whether the gradient's sign is turned.
        global_norm_clip_threshold: Largest norm of all gradients of a group together.
        clipnorm: Largest norm of each gradient.
        clipvalue: Largest absolute value of each element of a gradient.
        loss_scale_factor: What gradients are divided by first.
        use_ema: Whether an average of the parameters is kept.
        ema_momentum: Decay of that average.
        ema_overwrite_frequency: Updates after which averages replace the parameters.

    Raises:
        NotFoundError: There is no such variant.
        StateError: The variant can't be stepped.
        UsageError: Options that can't be; lists every one.

    Source: pytorch/pytorch, torch/optim/adamw.py; of the other variants the sources in schemas/adamw.json.
    """
    return transformation("adamw", variant, learning_rate, given(locals()))
