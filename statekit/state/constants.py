"""The constants of a variant: in which of its forms each difference between implementations comes.

A schema's `differences` say which forms there are, and its variants which one they have. Here they are types, so that
a step that asks for a difference or a form that no schema knows is found before it runs.

A rule is the variant's. What runs it may round at other places, or keep a number in another precision: that is an
execution, and `schemas/executions.json` has each with its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, TypedDict, get_args, get_type_hints, overload

from statekit.errors import Faults, NotFoundError, StateError
from statekit.state.schema import load_schema
from statekit.tensors.tree import shipped_json


class AdafactorConstants(TypedDict):
    """Of `schemas/adafactor.json`."""

    step_base: Literal["before", "after"]
    step_scope: Literal["shared", "global_step", "per_parameter", "per_transformation"]
    step_dtype: Literal["int32", "int64", "python_int", "float32"]
    decay_forms: Literal["pow", "any"]
    decay_offset: Literal["step_offset", "none"]
    decay_precision: Literal["float32", "float64", "parameter"]
    mix_form: Literal["one_minus_decay", "power"]
    second_moment_update: Literal["weighted_sum", "lerp"]
    epsilon1_place: Literal["added_to_square", "clamp"]
    statistic: Literal["mean", "sum"]
    mean_form: Literal["mean_of_squares", "squared_norm"]
    factored_rank: Literal["two_or_more", "two", "two_or_rule"]
    factored_axes: Literal["last_two", "two_largest", "two_largest_unstacked", "two_largest_or_rule"]
    factored_minimum: Literal["none", "second_largest", "second_largest_unless_rule"]
    v_row_averages: Literal["last", "largest", "largest_or_column"]
    v_col_averages: Literal["second_last", "second_largest", "second_largest_or_row"]
    tie_break: Literal["by_position", "last", "first", "argsort"]
    reduced_axis: Literal["dropped", "kept"]
    normaliser: Literal["mean", "clamped_mean"]
    precondition_form: Literal["powers", "rsqrts", "rsqrts_first", "estimate_rsqrt", "estimate_sqrt"]
    second_moment_dtype: Literal["float32", "parameter"]
    repeated_rows: Literal["summed", "squared_apart"]
    placeholders: Literal["none", "zeros_1", "int32_scalar"]
    redundant_v: bool
    slots_created: Literal["init", "first_gradient"]
    parameter_scale: Literal["option", "always"]
    parameter_scale_over: Literal["tensor", "non_batch", "non_stacked"]
    parameter_scale_reads: Literal["before_decay", "after_decay", "activation_copy"]
    parameter_scale_precision: Literal["float32", "parameter", "parameter_sequential", "norm_then_float64"]
    rms_form: Literal["root_of_mean", "norm_over_root"]
    clipping_over: Literal["tensor", "non_batch"]
    nan_norm: Literal["spreads", "limit"]
    clipping_applies_to: Literal["gradient", "step_size"]
    gradient_clipping: Literal["none", "global_norm", "base_class", "chain"]
    lr_source: Literal[
        "given", "given_or_rsqrt", "given_or_relative", "given_or_relative_compounding", "given_capped"
    ]
    lr_default_unscaled_factor: float | Literal["none"]
    lr_precision: Literal["float32", "float64", "parameter", "update"]
    weight_decay_form: Literal["none", "power", "lr", "step_size", "absent"]
    weight_decay_place: Literal["first", "after_scale", "last", "absent"]
    weight_decay_expression: Literal[
        "product", "subtract_twice", "product_first", "subtract_first", "sum", "absent"
    ]
    decay_exclusions: Literal["groups", "mask", "last_name_regex", "absent"]
    step_product: Literal["size_first", "rate_first"]
    update_form: Literal["subtract", "fused"]
    momentum_on: Literal["not_null", "nonzero", "never"]
    momentum_of: Literal["step", "absent"]
    bias_correction: Literal["none"]
    compute_dtype: Literal["float32", "parameter", "each_operation", "promoted"]
    parameter_storage: Literal["nearest", "eighth_power", "unbiased", "slice"]
    momentum_dtype: Literal["dtype_momentum", "float32", "parameter", "absent"]
    momentum_constant: Literal["rounded", "exact", "absent"]
    momentum_product: Literal["rounded_op_by_op", "rounded", "float32", "absent"]
    momentum_read: Literal["unrounded", "absent"]
    xla_perturbation: bool | None


class AdamWConstants(TypedDict):
    """Of `schemas/adamw.json`."""

    step_base: Literal["before", "after", "powers", "unused"]
    step_scope: Literal["shared", "per_parameter", "per_transformation", "global_step", "powers"]
    step_dtype: Literal["float32", "int32", "int64", "python_int", "powers"]
    first_moment_update: Literal["lerp", "weighted_sum", "weighted_sum_float32", "difference"]
    second_moment_update: Literal[
        "weighted_sum", "weighted_product", "weighted_product_float32", "difference", "lerp"
    ]
    bias_correction: Literal["both", "in_learning_rate", "none"]
    bias_correction_precision: Literal["float64", "float32", "parameter", "float32_powers", "absent"]
    denominator_form: Literal["root_over_root", "root_of_quotient", "root"]
    update_form: Literal[
        "step_size", "step_in_denominator", "direction", "reciprocal", "scaled_moment", "scaled_quotient"
    ]
    lr_precision: Literal["float64", "float32", "parameter", "update"]
    epsilon_place: Literal["beside_corrected_root", "beside_uncorrected_root"]
    weight_decay_form: Literal["lr", "none", "absent"]
    weight_decay_place: Literal["first", "with_update", "in_gradient", "absent"]
    weight_decay_expression: Literal["product_first", "subtract_first", "in_update", "in_gradient", "absent"]
    decay_exclusions: Literal["groups", "mask", "last_name_regex", "name_regex", "multiplier", "absent"]
    amsgrad_of: Literal["uncorrected", "corrected", "absent"]
    first_moment_dtype: Literal["parameter", "dtype_momentum", "float32"]
    repeated_rows: Literal["summed", "squared_apart"]
    moment_dtype: Literal["parameter", "float32"]
    moments_stored: Literal["averages", "corrected"]
    compute_dtype: Literal["float32", "parameter", "each_operation", "promoted", "converted"]
    momentum_read: Literal["unrounded", "same"]
    gradient_clipping: Literal["none", "elements", "base_class", "chain", "global_norm"]
    slots_created: Literal["init", "first_gradient"]


class LambConstants(TypedDict):
    """Of `schemas/lamb.json`."""

    step_base: Literal["before", "after"]
    step_scope: Literal["shared", "per_transformation", "per_group", "per_index_and_device"]
    step_dtype: Literal["int32", "int64", "python_int"]
    moment_update: Literal["weighted_sum", "difference"]
    repeated_rows: Literal["summed", "squared_apart"]
    moment_dtype: Literal["parameter", "float32"]
    compute_dtype: Literal["parameter", "promoted"]
    bias_correction: Literal["always", "option"]
    bias_correction_precision: Literal["float32", "parameter"]
    step_product: Literal["rate_last", "rate_first"]
    lr_precision: Literal["float32", "parameter", "update"]
    epsilon_place: Literal["beside_corrected_root"]
    weight_decay_form: Literal["lr_and_ratio", "lr"]
    weight_decay_place: Literal["in_direction", "first"]
    decay_exclusions: Literal["groups", "mask", "last_name_regex", "name_regex", "multiplier"]
    trust_ratio_on: Literal["all", "decayed", "not_excluded"]
    trust_ratio_fallback: Literal["zero_norm", "not_positive", "zero_or_nan"]
    trust_ratio_bounds: Literal["none", "lower_upper"]
    norm_reads: Literal["before_update", "after_decay"]
    gradient_clipping: Literal["none", "global_norm", "base_class", "chain", "elements"]
    gradient_buffer: Literal["kept", "update", "rescaled"]
    slots_created: Literal["init", "first_gradient"]


class LansConstants(TypedDict):
    """Of `schemas/lans.json`."""

    step_base: Literal["after"]
    step_scope: Literal["per_index_and_device", "per_group", "last_of_group", "unspecified"]
    state_dtype: Literal["float32", "parameter", "unspecified"]
    gradient_normalisation: Literal["norm", "norm_plus_epsilon"]
    zero_gradient: Literal["nan", "nan_unless_clipped", "skipped", "undefined"]
    norm_accumulation: Literal["float32_sequential", "scaled", "tree", "unspecified"]
    constants_precision: Literal["float32", "float64_rounded", "float64_on_float32", "unspecified"]
    clip_place: Literal["after_normalisation", "absent"]
    epsilon_place: Literal["beside_corrected_root"]
    bias_correction: Literal["always", "option"]
    weight_norm_of: Literal["stored", "master", "parameter"]
    trust_ratio_fallback: Literal["zero_norm", "zero_or_nan", "undefined"]
    false_bounds: Literal["ignored", "applied", "absent"]
    second_half_weight: Literal["old", "moved"]
    application: Literal["once", "twice"]
    rate_product: Literal["ratio_first", "rate_first", "norm_first", "unspecified"]
    lr_precision: Literal["float64", "unspecified"]
    second_moment_update: Literal["weighted_sum", "weighted_product", "unspecified"]
    second_half_factor: Literal["float64_product", "float32", "unspecified"]
    fma: Literal["none", "weight_decay"]
    gradient_buffer: Literal["kept", "normalised", "first_update", "unspecified"]
    global_clipping: Literal["none", "max_grad_norm"]
    extra_state: Literal["none", "scaled_grad", "norms", "master"]


class ScaledAdamConstants(TypedDict):
    """Of `schemas/scaled_adam.json`."""

    step_base: Literal["before"]
    step_scope: Literal["per_batch"]
    batching: Literal["by_dtype_and_shape"]
    named_parameters: Literal["required", "optional", "optional_per_group"]
    one_element: Literal["per_member"]
    scalar_size_slots: Literal["with_several_members", "never"]
    slots_created: Literal["together", "on_first_use"]
    state_order: Literal["delta_first", "delta_last"]
    state_dtype: Literal["parameter", "float32"]
    scalar_norm: Literal["plain", "scaled"]
    early_estimates: Literal["none", "at_10_20_40"]
    early_estimate_factor: float | Literal["none"]
    threshold_used: Literal["from_period", "once_set"]
    non_finite_median: Literal["kept", "error"]
    infinite_gradient: Literal["spreads", "zeroed_unless_logged", "zeroed"]
    nan_gradient: Literal["spreads"]
    clip_reaches: Literal["scale_grads", "everything"]
    log_below: float
    size_update_order: Literal["before_second_moment", "after_second_moment"]
    size_epsilon_place: Literal["beside_uncorrected_root"]
    size_step_limit: float | Literal["none"]
    max_rms_rule: Literal["replace", "limit"]
    tensor_bias_correction: Literal["below_99_percent"]
    scalar_bias_correction: Literal["always", "below_99_percent"]
    first_moment_bias_correction: Literal["none"]
    zero_step: bool
    delta_form: Literal["accumulate", "blend"]
    scalar_clamp: Literal["before_delta", "after_delta"]


class MuonConstants(TypedDict):
    """Of `schemas/muon.json`."""

    step_base: Literal["before", "unused"]
    step_scope: Literal["absent", "per_transformation", "shared", "unspecified"]
    step_dtype: Literal["absent", "int32", "int64"]
    momentum_buffer: Literal["mean", "sum"]
    momentum_update: Literal["lerp", "weighted_sum", "decayed_sum", "difference_sum"]
    nesterov_form: Literal["lerp", "sum", "weighted_sum"]
    bias_correction: Literal["none", "ahead"]
    bias_correction_precision: Literal["float32", "absent"]
    ns_dtype: Literal["bfloat16", "float16", "parameter", "option"]
    ns_cast: Literal["before_norm", "after_norm"]
    ns_rounding: Literal["addmm", "each_operation"]
    norm_epsilon: Literal["added", "least"]
    coefficient_table: Literal["whole", "cycled", "absent"]
    orientation: Literal["first", "second"]
    scale_axes: Literal["matrix", "last_two"]
    scale_place: Literal["rate", "low_update", "update", "step"]
    rank_above_two: Literal["refused", "filters", "by_rule", "adam"]
    weight_decay_form: Literal["lr", "absent"]
    weight_decay_place: Literal["first", "with_update", "absent"]
    weight_decay_expression: Literal["product_first", "subtract_first", "in_update", "absent"]
    decay_exclusions: Literal["groups", "mask", "last_name_regex", "absent"]
    lr_precision: Literal["float64", "update", "parameter"]
    first_moment_dtype: Literal["parameter", "dtype_momentum"]
    momentum_read: Literal["unrounded", "same"]
    compute_dtype: Literal["each_operation", "promoted", "converted"]
    gradient_clipping: Literal["none", "base_class", "chain"]
    slots_created: Literal["init", "first_gradient"]
    aside: Literal["another", "own_adam"]


CONSTANTS: Mapping[str, type] = {
    "adafactor": AdafactorConstants,
    "adamw": AdamWConstants,
    "lamb": LambConstants,
    "lans": LansConstants,
    "muon": MuonConstants,
    "scaled_adam": ScaledAdamConstants,
}
"""The type of each schema's constants."""


@overload
def variant_constants(
    schema: Literal["adafactor"], variant: str, execution: str | None = None
) -> AdafactorConstants: ...
@overload
def variant_constants(
    schema: Literal["adamw"], variant: str, execution: str | None = None
) -> AdamWConstants: ...
@overload
def variant_constants(
    schema: Literal["lamb"], variant: str, execution: str | None = None
) -> LambConstants: ...
@overload
def variant_constants(
    schema: Literal["lans"], variant: str, execution: str | None = None
) -> LansConstants: ...
@overload
def variant_constants(
    schema: Literal["muon"], variant: str, execution: str | None = None
) -> MuonConstants: ...
@overload
def variant_constants(
    schema: Literal["scaled_adam"], variant: str, execution: str | None = None
) -> ScaledAdamConstants: ...
@overload
def variant_constants(schema: str, variant: str, execution: str | None = None) -> Mapping[str, Any]: ...
def variant_constants(schema: str, variant: str, execution: str | None = None) -> Any:
    """Returns a variant's constants: difference -> name of its form.

    What a schema says is unknown of a variant is None, whatever its type; no step runs such a variant but one that can
    do without.

    Args:
        schema: Name of the schema.
        variant: Whose.
        execution: How it runs, where that has other forms (`statekit.state.constants`).

    Raises:
        NotFoundError: No schema or no variant of that name.
        StateError: The schema's constants aren't those of its type; lists all that differ.

    Example:
        >>> variant_constants("lamb", "keras")["weight_decay_place"]
        'first'
    """
    return _checked(schema, variant, execution)


@cache
def _checked(schema: str, variant: str, name: str | None) -> Mapping[str, Any]:
    entry = load_schema(schema).variant(variant)
    constants: Mapping[str, Any] = entry["constants"]
    if name is not None:
        constants = {**constants, **execution(name).forms.get(schema, {}).get(variant, {})}
    if schema in CONSTANTS:
        Faults(constant_faults(schema, constants, entry["unknown"])).check(
            StateError,
            f"The constants of a variant of {schema} aren't what its steps are written for",
            place=variant,
            expected=f"those of statekit.state.constants.{CONSTANTS[schema].__name__}",
        )
    return constants


def constant_faults(
    schema: str, constants: Mapping[str, Any], unknown: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with a variant's constants, each with the constant's name.

    Args:
        schema: Name of the schema.
        constants: Difference -> name of its form.
        unknown: Differences that nobody knows of the variant, which are None.
    """
    types = get_type_hints(CONSTANTS[schema])
    yield from (("is missing", name) for name in sorted(types.keys() - constants.keys()))
    yield from (("isn't a constant", name) for name in sorted(constants.keys() - types.keys()))
    for name in sorted(types.keys() & constants.keys()):
        if not (constants[name] is None and name in unknown) and not _fits(constants[name], types[name]):
            yield f"is {constants[name]!r}", name


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, type):
        return type(value) is kind
    options = get_args(kind)
    return any(value == option if isinstance(option, str) else _fits(value, option) for option in options)


Rounds: TypeAlias = Literal["op_by_op", "compiled"]
"""`op_by_op` rounds every low-precision product, `compiled` keeps products in float32."""


@dataclass(frozen=True)
class Execution:
    """How an original ran.

    Attributes:
        name: Its name.
        title: What ran where.
        rounds: Which roundings of low precision it makes.
        contracts: Whether products and sums may be contracted across operations.
        rounds_added: Whether a number that is added to arrays is rounded to their dtype first.
        forms: Schema -> variant -> constants that are others than the variant's.
    """

    name: str
    title: str
    rounds: Rounds
    contracts: bool
    rounds_added: bool
    forms: Mapping[str, Mapping[str, Mapping[str, Any]]]


@cache
def executions() -> Mapping[str, Execution]:
    """Returns all executions by name."""
    return {
        name: Execution(
            name,
            entry["title"],
            entry["rounds"],
            entry["contracts"],
            entry["added_numbers"] == "rounded",
            entry["forms"],
        )
        for name, entry in shipped_json("statekit.schemas", "executions.json").items()
    }


def execution(name: str) -> Execution:
    """Returns an execution.

    Raises:
        NotFoundError: There is none of that name.

    Example:
        >>> execution("cuda_fused").rounds
        'compiled'
    """
    forms = executions()
    if name not in forms:
        raise NotFoundError("There is no such execution.", expected=", ".join(forms), found=name)
    return forms[name]


def of_torch(device: str, *, fused: bool = False, capturable: bool = False) -> str:
    """Returns the name of the execution of an optimizer of PyTorch.

    Args:
        device: The type of its parameters' device.
        fused: Whether its fused kernel runs.
        capturable: Whether its count lives on the device.
    """
    if device == "cpu":
        return "compiled" if fused else "op_by_op"
    return "cuda_fused" if fused else "cuda_capturable" if capturable else "cuda"


def of_xla(platform: str, is_compiled: bool = True) -> str:
    """Returns the name of the execution of a function of JAX; what is known of CPUs is taken for TPUs too."""
    if not is_compiled:
        return "op_by_op"
    return "gpu" if platform in ("gpu", "cuda", "rocm") else "compiled"
