"""ScaledAdam on stacks of equal parameters, in place; `statekit.optim.scaled_adam` has the rule.

What is small is left to the text: how a parameter's size is learned. What touches every element is done here, and the
parameter's root mean square only when its turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from statekit.arrays.backend import Value
from statekit.optim.scaled_adam import setting, sized
from statekit.optim.scaled_adam_clip import reached
from statekit.optim.scaled_adam_forms import (
    ScaledAdamHyperparameters,
    ScaledAdamSetting,
    at_least,
    corrected_updates,
)
from statekit.optim.steps import Scene
from statekit.torch.fast.batching import (
    Followed,
    Slots,
    Stacked,
    Stacks,
    Tensors,
    by_name,
    in_stacks,
    pieces,
    plain,
    products,
    squares,
)
from statekit.torch.fast.numba_runner import Items, in_reach, pieces_of

SIZES = ("param_rms", "scale_exp_avg_sq", "scale_grads")


FOLLOWED = Followed(
    hyper=dict.fromkeys(
        (
            "clipping_scale", "betas", "scalar_lr_scale", "eps", "param_min_rms", "param_max_rms", "scalar_max",
            "size_update_period", "clipping_update_period",
        )
    ),
    forms={
        **dict.fromkeys(
            (
                "step_scope", "one_element", "scalar_norm", "early_estimates", "early_estimate_factor",
                "threshold_used", "non_finite_median", "infinite_gradient", "nan_gradient", "size_update_order",
                "size_epsilon_place", "size_step_limit", "max_rms_rule", "scalar_bias_correction", "scalar_clamp",
            )
        ),
        "clip_reaches": ("scale_grads", "everything"),
        "tensor_bias_correction": ("below_99_percent",),
        "first_moment_bias_correction": ("none",),
    },
    slots=("delta", "exp_avg_sq", "param_rms", "scale_exp_avg_sq", "scale_grads"),
)  # fmt: skip
"""All that concerns clipping and the sizes is done by the text itself, or has been done when a path is called."""


@dataclass(frozen=True)
class FastScaledAdam:
    """The update of parameters that share `hyper`, what `settle` returned."""

    hyper: ScaledAdamHyperparameters

    def __call__(
        self, scene: Scene, params: Tensors, grads: Tensors, slots: Slots, common: Value | None
    ) -> None:
        s = setting(scene, self.hyper)
        items = [
            params,
            [grad.contiguous() for grad in grads],
            *by_name(slots, ("delta", "exp_avg_sq")).values(),
        ]
        cuts = pieces_of(params)
        if in_reach(items, cuts) and (
            common is None or s.form["infinite_gradient"] == "spreads" or common > 0.0
        ):
            self._in_loops(s, items, slots, 1.0 if common is None else float(common), cuts)
            return
        (beta1, beta2), correction = self.hyper.betas, _correction(s)

        def kernel(part: slice, stacks: Stacks, rooms: Tensors) -> None:
            p, g, delta, v, y = *(stacks[name] for name in ("param", "grad", "delta", "exp_avg_sq")), rooms[0]
            short = g if common is None else reached(s, g, common)
            used = short if s.form["clip_reaches"] == "everything" else g
            factor, x = _learn(
                s, products(p, short), squares(p) if _refreshes(s) else None, p[0].numel(), stacks
            )
            factor, x = factor.view(-1, 1), x.view(-1, 1)
            for p_, g_, delta_, v_, y_ in pieces(p, used, delta, v, y):
                v_.mul_(beta2).addcmul_(g_, g_, value=1.0 - beta2)
                # Corrected before the root is taken: what overflows must do so as in the text.
                root = (
                    torch.sqrt(v_, out=y_) if correction == 1.0 else torch.div(v_, correction, out=y_).sqrt_()
                )
                torch.div(g_, root.add_(self.hyper.eps), out=y_)
                delta_.mul_(beta1).addcmul_(y_, factor)
                if s.size_due:
                    delta_.addcmul_(p_, x)
                p_.add_(delta_)

        names = ("delta", "exp_avg_sq", *SIZES)
        in_stacks(kernel, {"param": params, **by_name(slots, names)}, {"grad": grads})

    def _in_loops(
        self, s: ScaledAdamSetting, items: Sequence[Tensors], slots: Slots, clip: float, cuts: int
    ) -> None:
        """Moves parameters and slots where they lie, in pieces; `clip` is what gradients are multiplied with."""
        from statekit.torch.fast import numba_kernels

        params, (beta1, beta2) = items[0], self.hyper.betas
        count = params[0].numel()
        loops, sums = Items.of(items, (count // cuts,)), params[0].new_empty((len(params), cuts, 2))
        loops.run(numba_kernels.scaled_adam_sums, sums.view(-1, 2), clip)
        gradient, square = sums.sum(1).unbind(1)
        sizes = {name: Stacked(tensors, len(params)) for name, tensors in by_name(slots, SIZES).items()}
        factor, x = _learn(
            s,
            gradient,
            square if _refreshes(s) else None,
            count,
            {name: size.read() for name, size in sizes.items()},
        )
        for size in sizes.values():
            size.write()
        loops.run(
            numba_kernels.scaled_adam_params,
            *(values.reshape(-1).repeat_interleave(cuts) for values in (factor, x)),
            bool(s.size_due), clip if s.form["clip_reaches"] == "everything" else 1.0,
            beta1, beta2, 1.0 - beta2, 1.0 / _correction(s), self.hyper.eps,
        )  # fmt: skip


def _refreshes(s: ScaledAdamSetting) -> bool:
    return bool(s.period_ends or s.step == 0)


def _correction(s: ScaledAdamSetting) -> float:
    """Returns what second moments are divided by; 1 where that changes nothing any more."""
    beta2 = s.hyper.betas[1]
    return 1.0 - beta2 ** (s.step + 1) if s.step < corrected_updates(beta2) else 1.0


def _learn(
    s: ScaledAdamSetting, gradient: torch.Tensor, square: torch.Tensor | None, count: int, sizes: Stacks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves the slots that learn the sizes of parameters.

    Args:
        s: Where the update runs.
        gradient: The sum of p g of each parameter.
        square: The sum of p^2; None where root mean squares aren't due.
        count: The elements of a parameter.
        sizes: Those slots.

    Returns:
        What directions are multiplied with, and by how much of themselves parameters grow.
    """
    rms, beta1 = sizes["param_rms"], s.hyper.betas[0]
    if square is not None:
        rms = (square / count).sqrt_().view_as(rms)
    learned = {name: sizes[name] for name in SIZES}
    after, x = torch.vmap(lambda g, r, slots: sized(s, g, r, slots, "float32"))(
        gradient.view_as(rms), rms, learned
    )
    for name in SIZES:
        sizes[name].copy_(after[name])
    return at_least(s, sizes["param_rms"], "float32") * (s.rate * (beta1 - 1.0)), x * (1.0 - beta1)


def fast_scaled_adam(
    variant: str, hyper: ScaledAdamHyperparameters, param: torch.Tensor
) -> FastScaledAdam | None:
    """Returns the fast path of a parameter; None if it has a single element or another rule."""
    fits = FOLLOWED.fits("scaled_adam", variant, hyper)
    return FastScaledAdam(hyper) if fits and plain(param) and param.numel() > 1 else None
