"""The states of Optax' links by the names of their fields, which is all that a file keeps of a class.

    CORES       the links that an optimizer of a schema is known by
    STRANGERS   optimizers of Optax without a schema, each with its fields that are trees like the parameters'
    WRAPPERS    what stands around an optimizer, with the field that the optimizer's own state lies in
    NEIGHBOURS  what stands before or behind an optimizer in a chain, with state of its own

Source: google-deepmind/optax 0.2.8: optax/_src/transform.py, factorized.py, combine.py, wrappers.py, linesearch.py,
optax/transforms/, optax/contrib/; AI-Hypercomputer/maxtext optimizers.py, `skip_step_on_spikes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


def _fields(names: str) -> frozenset[str]:
    return frozenset(names.split())


@dataclass(frozen=True)
class Stranger:
    """An optimizer without a schema.

    Attributes:
        name: Its name.
        trees: Its fields that are trees like the parameters'.
    """

    name: str
    trees: tuple[str, ...]


def _stranger(name: str, trees: str) -> Stranger:
    return Stranger(name, tuple(trees.split()))


STRANGERS: Final[dict[frozenset[str], Stranger]] = {
    _fields("count mu"): _stranger("Lion", "mu"),
    _fields("trace"): _stranger("SGD with momentum", "trace"),
    _fields("nu"): _stranger("RMSprop", "nu"),
    _fields("count nu"): _stranger("RMSprop", "nu"),
    _fields("mu nu"): _stranger("centered RMSprop", "mu nu"),
    _fields("sum_of_squares"): _stranger("Adagrad", "sum_of_squares"),
    _fields("e_g e_x"): _stranger("Adadelta", "e_g e_x"),
    _fields("m v n g t"): _stranger("Adan", "m v n g"),
    _fields("count count_m2 m1 m2 nu"): _stranger("AdEMAMix", "m1 m2 nu"),
    _fields("t m n"): _stranger("simplified AdEMAMix", "m n"),
    _fields("count mu nu hessian_fn_state"): _stranger("Sophia", "mu nu"),
    _fields("step_sizes prev_updates"): _stranger("Rprop", "step_sizes prev_updates"),
    _fields("is_initial_step previous_gradient"): _stranger(
        "optimistic gradient descent", "previous_gradient"
    ),
    _fields("count params updates diff_params_memory diff_updates_memory weights_memory"): _stranger(
        "L-BFGS", "params updates diff_params_memory diff_updates_memory"
    ),
    _fields("init_particles cumulative_gradients scale subgradients reward"): _stranger(
        "COCOB", "init_particles cumulative_gradients scale subgradients reward"
    ),
    _fields("exp_avg exp_avg_sq grad_sum estim_lr numerator_weighted count"): _stranger(
        "D-Adaptation AdamW", "exp_avg exp_avg_sq grad_sum"
    ),
    _fields("exp_avg exp_avg_sq grad_sum params0 estim_lr numerator_weighted count"): _stranger(
        "Prodigy", "exp_avg exp_avg_sq grad_sum params0"
    ),
    _fields("exp_avg barf gamma lb count"): _stranger("MoMo", "exp_avg"),
    _fields("exp_avg exp_avg_sq barf gamma lb count"): _stranger("MoMo-Adam", "exp_avg exp_avg_sq"),
    _fields("is_init_step init_params max_dist sum_sq_norm_grads"): _stranger("DoG", "init_params"),
    _fields("init_params weighted_sq_norm_grads estim_sq_dist"): _stranger("DoWG", "init_params"),
    _fields("max_dist grad_sum_of_squares init_params"): _stranger(
        "layer-wise distance over gradients", "max_dist grad_sum_of_squares init_params"
    ),
    _fields("count grad_sum_sq s x0"): _stranger("MADGRAD", "grad_sum_sq s x0"),
    _fields("count base_optimizer_state projector"): _stranger("GaLore", "projector"),
}
GALORE: Final = _fields("count base_optimizer_state projector")
"""Its inner optimizer's slots have other shapes than the parameters: no optimizer's of its own name."""
NOVOGRAD: Final = _stranger("NovoGrad", "mu nu")
"""It has the fields of Adam, and of each parameter one number in `nu`."""

SM3: Final = _stranger("SM3", "nu")
"""It has the fields of centered RMSprop, and in `mu` a vector for each axis."""


@dataclass(frozen=True)
class Wrapper:
    """What stands around an optimizer.

    Attributes:
        name: Its name in Optax.
        inner: The field in which the optimizer's state lies.
        changes: Whether it changes what the optimizer's updates do, beyond leaving some of them out.
        code: How a program puts `optimizer` into it, with `...` for what no file says; "" where a mask, a partition or
            `inject_hyperparams` is made with the optimizer itself.
    """

    name: str
    inner: str
    changes: bool = False
    code: str = ""


_MULTI_STEPS: Final = Wrapper(
    "MultiSteps",
    "inner_opt_state",
    code="optax.MultiSteps(optimizer, every_k_schedule=...)  # as many as the run took",
)
WRAPPERS: Final[dict[frozenset[str], Wrapper]] = {
    _fields("inner_state"): Wrapper("masked", "inner_state"),
    _fields("inner_states"): Wrapper("partition", "inner_states"),
    _fields("count hyperparams inner_state"): Wrapper("inject_hyperparams", "inner_state"),
    _fields("count hyperparams hyperparams_states inner_state"): Wrapper("inject_hyperparams", "inner_state"),
    _fields("mini_step gradient_step inner_opt_state acc_grads"): _MULTI_STEPS,
    _fields("mini_step gradient_step inner_opt_state acc_grads skip_state"): _MULTI_STEPS,
    _fields("notfinite_count last_finite total_notfinite inner_state"): Wrapper(
        "apply_if_finite",
        "inner_state",
        code="optax.apply_if_finite(optimizer, max_consecutive_errors=...)  # as many as the run bore",
    ),
    _fields("inner_state losses grad_norms count is_skipped"): Wrapper(
        "MaxText's skip_step_on_spikes",
        "inner_state",
        code="skip_step_on_spikes(optimizer, interval=..., scaling_factor=...)  # of MaxText's optimizers.py",
    ),
    _fields("step opt_state"): Wrapper("nnx.Optimizer", "opt_state"),
    _fields("inner_state step"): Wrapper(
        "conditionally_transform or conditionally_mask",
        "inner_state",
        True,
        "optax.transforms.conditionally_transform(optimizer, ...)  # or conditionally_mask, as the run had it",
    ),
    _fields("b1 weight_sum step_count max_lr base_optimizer_state z"): Wrapper(
        "schedule_free",
        "base_optimizer_state",
        True,
        "optax.contrib.schedule_free(optimizer, learning_rate=...)",
    ),
    _fields("base_optimizer_state count r m v s x0"): Wrapper(
        "mechanize", "base_optimizer_state", True, "optax.contrib.mechanize(optimizer)"
    ),
    _fields("steps_since_sync opt_state adv_state cache"): Wrapper(
        "sam",
        "opt_state",
        True,
        "optax.contrib.sam(optimizer, ...)  # the optimizer of the adversarial steps",
    ),
    _fields("fast_state steps_since_sync"): Wrapper(
        "lookahead", "fast_state", True, "optax.lookahead(optimizer, sync_period=..., slow_step_size=...)"
    ),
}
FINITE: Final = "apply_if_finite"
ACCUMULATES: Final = "MultiSteps"
SPIKES: Final = "MaxText's skip_step_on_spikes"
INNER: Final = frozenset(wrapper.inner for wrapper in WRAPPERS.values()) - {"opt_state"}
"""The fields in which an optimizer's state lies within another's; `opt_state` may be a train state's as well."""

PLATEAU: Final = "reduce_on_plateau"
SCHEDULE: Final = "schedule"
NEIGHBOURS: Final[dict[frozenset[str], str]] = {
    _fields("count"): SCHEDULE,
    _fields("scale best_value plateau_count cooldown_count count avg_value"): PLATEAU,
    _fields("count ema"): "ema, an average of the updates",
    _fields("trace"): "trace, a momentum of the updates",
    _fields("count rng_key"): "add_noise",
    _fields("rng_key"): "differentially_private_aggregate",
    _fields("is_initial_step previous_gradient"): "scale_by_optimistic_gradient",
    _fields("max_dist grad_sum_of_squares init_params"): "scale_by_distance_over_gradients",
}
"""By their fields, links with state of their own."""
LINK_CODE: Final[dict[frozenset[str], str]] = {
    _fields("count"): "optax.scale_by_schedule(...)",
    _fields(
        "scale best_value plateau_count cooldown_count count avg_value"
    ): "optax.contrib.reduce_on_plateau(...)",
    _fields("count ema"): "optax.ema(...)",
    _fields("trace"): "optax.trace(...)",
}
"""By their fields, how a program makes such links."""
IDLE: Final = frozenset(
    {_fields("measurement"), _fields("measurements measure_states"), _fields("found_nan")}
)
"""The fields of links that leave finite updates as they are: snapshot, monitor, zero_nans."""
