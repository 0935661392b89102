"""Adafactor as a torch.optim.Optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from statekit.dropin.by_name import UNSET, Unset, given
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.torch.optimizer import Engine, Params, Rate


@final
class Adafactor(Engine):
    """Moves parameters as one of the Adafactors does; by default as T5X's.

    The state of a parameter is `v_row` and `v_col`, or `v`, and with momentum `m`: zeros from the moment the parameter
    is added, so leave frozen parameters out. In T5X's variant they are float32, `m` is in `dtype_momentum`. Each group
    counts its updates in `step`: every call of `step` counts, whatever the gradients are. Where the variant counts
    the updates of each parameter by itself (hf, fairseq, torch), one without a gradient falls behind.

    The learning rate is the one before parameter scale. T5X never steps without a schedule, so there is no default:
    `step` raises until every group has an `lr`, but for variants that have a rate of their own (t2t_early, t2t_late,
    mesh_tf; hf and fairseq with `relative_step`). With `multiply_by_parameter_scale` steps are relative to the size of
    the parameter, without it they are absolute. T5X's usual schedule, for an optimizer with lr=1.0:
    `LambdaLR(optimizer, lambda step: max(step, 10_000) ** -0.5)`.

    Not every variant offers every option; what isn't given is as the variant has it (schemas/adafactor.json).

    Args:
        params: `model.named_parameters()`, or groups whose `params` are (name, parameter); options of a group
            outweigh those below.
        lr: Learning rate: a number, a 0-d tensor, or None if it is given later.
        variant: Whose rule: t5x, t2t_early, t2t_late, mesh_tf, hf, fairseq, torch, optax or keras.
        foreach: Whether equal parameters are moved together; if not, each by itself, bit for bit as replay does.
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
        StateError: There is no such variant, or it can't be stepped.
        UsageError: Parameters without names, of rank 3 and more without a rule, or options that can't be.

    Source: T5X t5x/adafactor.py, `Adafactor`; of the other variants the sources in schemas/adafactor.json.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(4, 3)
        >>> optimizer = Adafactor(linear.named_parameters(), lr=1e-3)
        >>> linear(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.param_groups[0]["step"]
        1
    """

    def __init__(
        self,
        params: Params,
        lr: Rate = None,
        *,
        variant: str = "t5x",
        foreach: bool = True,
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
    ) -> None:
        super().__init__(params, lr, variant, foreach, given(locals()))

    @staticmethod
    def _schema() -> OptimizerSchema:
        return load_schema("adafactor")
