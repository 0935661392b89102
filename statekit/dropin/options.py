"""What the drop-in optimizers of torch, JAX and TensorFlow take, for type checkers and for `help`.

One TypedDict for each optimizer names the options of all its variants, by canonical names first, then by the variants'
own. Types, ranges, meanings and defaults are the schema's; a test holds both together.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from statekit.errors import Faults, UsageError
from statekit.state.options import native_options, taken
from statekit.state.schema import OptimizerSchema, load_schema

T = TypeVar("T", bound=Callable[..., Any])


class _AroundUpdate(TypedDict, total=False):
    """What Adafactor, LAMB, AdamW and Muon take for clipping, accumulation and averages, as Keras' base class does."""

    global_norm_clip_threshold: float | None
    clipnorm: float | None
    clipvalue: float | None
    loss_scale_factor: float | None
    gradient_accumulation_steps: int | None
    use_ema: bool
    ema_momentum: float | None
    ema_overwrite_frequency: int | None
    global_clipnorm: float | None


class AdafactorOptions(_AroundUpdate, total=False):
    """What Adafactor takes beside its learning rate."""

    factored: bool
    multiply_by_parameter_scale: bool | Sequence[tuple[str, bool]] | Mapping[str, bool]
    beta1: float | None
    decay_rate: float
    step_offset: int
    clipping_threshold: float | None
    weight_decay_rate: float | None
    min_dim_size_to_factor: int
    epsilon1: float | None
    epsilon2: float
    dtype_momentum: str
    factor_map: Sequence[tuple[str, Any]] | Mapping[str, Any] | None
    weight_decay_rate_lr_exponent: float | None
    max_parameter_scale: float | None
    skip_nan_updates: bool
    relative_step: bool
    warmup_init: bool
    decay_type: str
    beta2: float | None
    second_moment_decay: float | None
    simulated_quantize_bits: int | None
    parameter_encoding: str | None
    stacked_dim_names: Sequence[str] | None
    activation_dtype: str
    exclude_from_parameter_scale: Sequence[str] | None
    exclude_from_weight_decay: Sequence[str] | Mapping[str, bool] | None
    maximize: bool

    beta2_decay: float
    beta_2_decay: float
    clip_threshold: float | None
    d: float | None
    decay_offset: int
    eps: float | Sequence[float | None] | None
    epsilon_1: float | None
    epsilon_2: float
    momentum: float | None
    scale_parameter: bool | Sequence[tuple[str, bool]] | Mapping[str, bool]
    weight_decay: float | None


class ScaledAdamOptions(TypedDict, total=False):
    """What ScaledAdam takes beside its learning rate."""

    clipping_scale: float | None
    betas: Sequence[float]
    scalar_lr_scale: float
    eps: float
    param_min_rms: float
    param_max_rms: float
    scalar_max: float
    size_update_period: int
    clipping_update_period: int
    parameters_names: Sequence[Any] | None
    show_dominant_parameters: bool


class LansOptions(TypedDict, total=False):
    """What LANS takes beside its learning rate."""

    beta1: float | None
    beta2: float | None
    epsilon: float | None
    wd: float | None
    lower_bound: float | None
    upper_bound: float | None
    clip_gradient: float | None
    rescale_grad: float
    lr_mult: Mapping[str, float]
    wd_mult: Mapping[str, float]
    multi_precision: bool
    begin_num_update: int
    aggregate_num: int | None
    use_fused_step: bool
    bias_correction: bool
    grad_averaging: bool
    normalize_grad: bool
    adam_w_mode: bool

    betas: Sequence[float]
    eps: float | None
    weight_decay: float | None


class AdamFamilyOptions(_AroundUpdate, total=False):
    """What LAMB and AdamW take beside their learning rate."""

    beta1: float
    beta2: float
    epsilon: float
    epsilon_root: float
    weight_decay_rate: float | None
    exclude_from_weight_decay: Sequence[str] | Mapping[str, bool] | None

    b1: float
    b2: float
    beta_1: float
    beta_2: float
    eps: float
    eps_root: float
    weight_decay: float | None


class LambOptions(AdamFamilyOptions, total=False):
    """What LAMB takes beside its learning rate."""


class AdamWOptions(AdamFamilyOptions, total=False):
    """What AdamW takes beside its learning rate."""

    amsgrad: bool
    nesterov: bool
    dtype_momentum: str | None
    decoupled_weight_decay: bool
    maximize: bool

    adam_b1: float
    adam_b2: float
    adam_eps: float
    adam_eps_root: float
    adam_weight_decay: float | None
    adamw_betas: Sequence[float]
    adamw_eps: float
    adamw_mask: Sequence[str] | Mapping[str, Any] | None
    betas: Sequence[float]
    gradient_clipping: float | None
    mu_dtype: str | None
    wd: float | None


class MuonOptions(_AroundUpdate, total=False):
    """What Muon takes beside its learning rate."""

    momentum: float
    nesterov: bool
    ns_coefficients: Sequence[Any]
    ns_steps: int
    ns_precision: str
    epsilon: float
    shape_scale: str
    scale_factor: float
    weight_decay_rate: float | None
    exclude_from_weight_decay: Sequence[str] | Mapping[str, bool] | None
    weight_decay_method: str
    dtype_momentum: str | None
    adaptive: bool
    preconditioning: str

    adjust_lr_fn: str | None
    beta: float
    coefficient_type: str | Sequence[Any]
    consistent_rms: float | None
    eps: float
    extra_scale_factor: float
    fp32_matmul_prec: str
    mu_dtype: str | None
    muon_a: float
    muon_b: float
    muon_c: float
    ns_coeffs: str | Sequence[Any]
    num_ns_steps: int
    rms_rate: float | None
    scale_mode: str
    wd: float | None
    weight_decay: float | None


class Overrides(TypedDict, total=False):
    """What `load_optimizer` takes of hyperparameters, by every name that a variant has, and of changes at loading."""

    factored: Any
    multiply_by_parameter_scale: Any
    beta1: Any
    decay_rate: Any
    step_offset: Any
    clipping_threshold: Any
    weight_decay_rate: Any
    min_dim_size_to_factor: Any
    epsilon1: Any
    epsilon2: Any
    dtype_momentum: Any
    factor_map: Any
    weight_decay_rate_lr_exponent: Any
    global_norm_clip_threshold: Any
    max_parameter_scale: Any
    skip_nan_updates: Any
    relative_step: Any
    warmup_init: Any
    decay_type: Any
    beta2: Any
    second_moment_decay: Any
    simulated_quantize_bits: Any
    parameter_encoding: Any
    stacked_dim_names: Any
    activation_dtype: Any
    exclude_from_parameter_scale: Any
    exclude_from_weight_decay: Any
    maximize: Any
    clipnorm: Any
    clipvalue: Any
    loss_scale_factor: Any
    gradient_accumulation_steps: Any
    use_ema: Any
    ema_momentum: Any
    ema_overwrite_frequency: Any
    beta2_decay: Any
    beta_2_decay: Any
    clip_threshold: Any
    d: Any
    decay_offset: Any
    eps: Any
    epsilon_1: Any
    epsilon_2: Any
    global_clipnorm: Any
    momentum: Any
    scale_parameter: Any
    weight_decay: Any
    clipping_scale: Any
    betas: Any
    scalar_lr_scale: Any
    param_min_rms: Any
    param_max_rms: Any
    scalar_max: Any
    size_update_period: Any
    clipping_update_period: Any
    parameters_names: Any
    show_dominant_parameters: Any
    epsilon: Any
    wd: Any
    lower_bound: Any
    upper_bound: Any
    clip_gradient: Any
    rescale_grad: Any
    lr_mult: Any
    wd_mult: Any
    multi_precision: Any
    begin_num_update: Any
    aggregate_num: Any
    use_fused_step: Any
    bias_correction: Any
    grad_averaging: Any
    normalize_grad: Any
    adam_w_mode: Any
    epsilon_root: Any
    b1: Any
    b2: Any
    beta_1: Any
    beta_2: Any
    eps_root: Any
    amsgrad: Any
    nesterov: Any
    decoupled_weight_decay: Any
    gradient_clipping: Any
    adam_b1: Any
    adam_b2: Any
    adam_eps: Any
    adam_eps_root: Any
    adam_weight_decay: Any
    adamw_betas: Any
    adamw_eps: Any
    adamw_mask: Any
    mu_dtype: Any
    ns_coefficients: Any
    ns_steps: Any
    ns_precision: Any
    shape_scale: Any
    scale_factor: Any
    weight_decay_method: Any
    adaptive: Any
    preconditioning: Any
    adjust_lr_fn: Any
    beta: Any
    coefficient_type: Any
    consistent_rms: Any
    extra_scale_factor: Any
    fp32_matmul_prec: Any
    muon_a: Any
    muon_b: Any
    muon_c: Any
    ns_coeffs: Any
    num_ns_steps: Any
    rms_rate: Any
    scale_mode: Any
    slot_policy: Any
    drop_slots_of: Any
    loss_scale: Any
    init_missing: Any
    name: Any


OPTIONS: Mapping[str, type] = {
    "adafactor": AdafactorOptions,
    "scaled_adam": ScaledAdamOptions,
    "lans": LansOptions,
    "lamb": LambOptions,
    "adamw": AdamWOptions,
    "muon": MuonOptions,
}
"""By schema."""


def refuse_options(faults: Iterable[tuple[str, str]], remedy: str = "") -> None:
    """Raises UsageError if options of a new optimizer can't be used."""
    Faults(faults).check(UsageError, "The optimizer's options can't be used", remedy=remedy)


_PLACE = "{arguments}"
"""What of a docstring stands for the arguments."""
_WIDTH = 108


def documented(schema: str, usual: str, arguments: str) -> Callable[[T], T]:
    """Returns a decorator that puts what an optimizer takes into its docstring, in the place of `{arguments}`.

    Args:
        schema: Name of the schema.
        usual: The variant that is followed if none is given; its defaults are shown.
        arguments: What all optimizers of the framework take, as sections of a docstring: in them `{variants}` are the
            schema's, `{options}` its options, and `{usual}` is the usual variant.
    """

    def with_arguments(optimizer: T) -> T:
        if optimizer.__doc__:  # there is none under python -OO
            *first, last = load_schema(schema).stepped
            options = "\n    ".join(described(schema, usual))
            filled = arguments.format(variants=f"{', '.join(first)} or {last}", usual=usual, options=options)
            before, indent, after = re.split(
                rf"^( *){re.escape(_PLACE)}$", optimizer.__doc__, flags=re.MULTILINE
            )
            optimizer.__doc__ = f"{before}{textwrap.indent(filled.strip(), indent)}{after}"
        return optimizer

    return with_arguments


def described(schema: str, usual: str) -> list[str]:
    """Returns the lines of a docstring's `Args` about the options of a schema."""
    rules, variants = load_schema(schema), load_schema(schema).stepped
    names = dict.fromkeys(name for variant in (usual, *variants) for name in taken(schema, variant))
    return [
        line
        for name in names
        for line in textwrap.wrap(
            f"{name}: {_explained(rules, name, usual, variants)}", _WIDTH, subsequent_indent="    "
        )
    ]


def _explained(rules: OptimizerSchema, name: str, usual: str, variants: Sequence[str]) -> str:
    """Returns the help of an option: its meaning, default and variants, and their own names for it."""
    spec, defaults = rules.hyperparameters[name], rules.variant(usual)["defaults"]
    having = [variant for variant in variants if name in taken(rules.name, variant)]
    spellings: dict[str, list[str]] = {}
    for variant in having:
        spelling = rules.spelling(variant, name)
        if name in native_options(rules.name, variant).get(spelling.argument, {}):
            spellings.setdefault(str(spelling), []).append(variant)
    also = ", ".join(f"{spelling} ({', '.join(callers)})" for spelling, callers in spellings.items())
    parts = [
        _in_python(spec["meaning"]),
        _in_python(spec.get("note", "")),
        f"Default: {defaults[name]!r}." if name in defaults else "",
        f"Only of {', '.join(having)}." if len(having) < len(variants) else "",
        f"Also called {also}." if also else "",
    ]
    return " ".join(part for part in parts if part)


def _in_python(text: str) -> str:
    """Returns a text about JSON values as one about Python's."""
    return re.sub(r"\b([Nn]ull|true|false)\b", lambda match: str(json.loads(match[0].lower())), text)
