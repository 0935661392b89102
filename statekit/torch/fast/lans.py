"""LANS on stacks of equal parameters, in place; `statekit.optim.lans` has the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from statekit.arrays.backend import Value, backend
from statekit.optim import lans
from statekit.optim.adam_moments import CORRECTION, RATE
from statekit.optim.steps import Scene
from statekit.state.constants import variant_constants
from statekit.torch.fast.adamw import Adam
from statekit.torch.fast.batching import (
    Followed,
    Slots,
    Stacks,
    Tensors,
    by_name,
    in_stacks,
    pieces,
    plain,
    squares,
)
from statekit.torch.fast.numba_runner import Items, in_reach, pieces_of

FOLLOWED = Followed(
    hyper=dict.fromkeys(
        (
            "beta1", "beta2", "epsilon", "wd", "lower_bound", "upper_bound", "rescale_grad", "begin_num_update",
            "bias_correction", "normalize_grad", "multi_precision",
        )
    ),
    forms={
        **dict.fromkeys(("step_scope", "zero_gradient", "trust_ratio_fallback", "false_bounds")),
        "gradient_normalisation": ("norm", "norm_plus_epsilon"),
        "norm_accumulation": ("float32_sequential", "tree", "unspecified"),
        "epsilon_place": ("beside_corrected_root",),
        "second_half_weight": ("old",),
    },
    slots=("m", "v", "master"),
)  # fmt: skip
"""A parameter that `multi_precision` concerns is float16, and goes the text's way."""


@dataclass(frozen=True)
class FastLans:
    """The update of parameters that share `config`, what `settle` returned."""

    config: lans.ParamConfig
    variant: str

    def __call__(self, scene: Scene, params: Tensors, grads: Tensors, slots: Slots, common: Any) -> None:
        xp, hyper, constants = backend("torch"), self.config.hyper, variant_constants("lans", self.variant)
        rate = RATE[constants["lr_precision"]](xp, scene.rate) * self.config.lr_mult
        s = lans.LansSetting(xp, constants, hyper, rate, self.config.wd, scene.step + hyper.begin_num_update)
        c1, c2 = (self._correction(s, beta) for beta in (hyper.beta1, hyper.beta2))
        share, root = lans.SECOND_SHARE[constants["second_half_factor"]](s), math.sqrt(c2)
        moments = by_name(slots, ("m", "v"))
        items = [params, [grad.contiguous() for grad in grads], *moments.values()]
        cuts = pieces_of(params)
        # Loops divide by taking reciprocals: one of a subnormal epsilon would be infinite.
        if in_reach(items, cuts) and not 0.0 < hyper.epsilon < torch.finfo(torch.float32).tiny:
            self._in_loops(s, c1, c2, share, items, cuts)
            return
        # The kernel takes 1 - beta in float64; so it gets the weight that the rule has.
        adam = Adam(1.0 - s.first.new, 1.0 - s.second.new, hyper.epsilon * root, root / c1)

        def kernel(part: slice, stacks: Stacks, rooms: Tensors) -> None:
            (p, g, m, v), (a, b, divisor) = (stacks[name] for name in ("param", "grad", "m", "v")), rooms
            if hyper.rescale_grad != 1.0:
                g = torch.mul(g, hyper.rescale_grad, out=b)  # a norm is taken after that: it may overflow
            norm = squares(g).sqrt_().view(-1, 1) if hyper.normalize_grad else g.new_ones(())
            total = g.new_zeros((3, len(p)))
            for p_, g_, m_, v_, a_, b_, divisor_ in pieces(p, g, m, v, a, b, divisor):
                torch.div(g_, norm, out=b_)
                adam(-1.0, [a_.zero_()], [b_], [m_], [v_])
                b_.div_(torch.sqrt(v_, out=divisor_).add_(adam.epsilon))  # without its factor, the root
                if s.wd:
                    a_.add_(p_, alpha=s.wd)
                    b_.add_(p_, alpha=s.wd / root)
                total += torch.stack((squares(p_), squares(a_), squares(b_)))
            weight, first, second = total.sqrt_()
            weight = lans.bounded(s, weight)
            first = lans.coefficient(s, weight, first, s.first.old).view(-1, 1)
            second = lans.coefficient(s, weight, second * root, share).view(-1, 1) * root
            for p_, a_, b_ in pieces(p, a, b):
                p_.addcmul_(a_, first, value=-1.0).addcmul_(b_, second, value=-1.0)

        in_stacks(kernel, {"param": params, **moments}, {"grad": grads}, rooms=3)

    def _in_loops(
        self, s: lans.LansSetting, c1: float, c2: float, share: Value, items: Sequence[Tensors], cuts: int
    ) -> None:
        """Moves parameters, their gradients and slots where they lie, in pieces; c1 and c2 correct the moments."""
        from statekit.torch.fast import numba_kernels

        hyper, params = s.hyper, items[0]
        loops = Items.of(items, (params[0].numel() // cuts,))
        sums = params[0].new_empty((len(params), cuts, 3))
        scaling, corrections = (hyper.rescale_grad, s.wd), (1.0 / c1, 1.0 / c2, hyper.epsilon)
        weights = (s.first.old, s.first.new, s.second.old, s.second.new)
        by_norm = params[0].new_ones(len(params) * cuts)
        if hyper.normalize_grad:
            loops.run(numba_kernels.lans_squares, by_norm, hyper.rescale_grad)
            by_norm = by_norm.view(-1, cuts).sum(1).sqrt_().reciprocal_().repeat_interleave(cuts)
        loops.run(numba_kernels.lans_moments, by_norm, sums.view(-1, 3), *scaling, *weights, *corrections)
        weight, first, second = sums.sum(1).sqrt_().unbind(1)
        weight = lans.bounded(s, weight)
        halves = lans.coefficient(s, weight, first, s.first.old), lans.coefficient(s, weight, second, share)
        sizes = torch.stack(halves, 1).repeat_interleave(cuts, 0)
        loops.run(numba_kernels.lans_params, by_norm, sizes, *scaling, *corrections)

    def _correction(self, s: lans.LansSetting, beta: float) -> float:
        if not s.hyper.bias_correction:
            return 1.0
        return float(CORRECTION[s.form["constants_precision"]](s.xp, beta, s.count + 1))


def fast_lans(variant: str, config: lans.ParamConfig, param: torch.Tensor) -> FastLans | None:
    """Returns the fast path of a parameter, or None if it hasn't one."""
    constants, hyper = variant_constants("lans", variant), config.hyper
    fits = (
        FOLLOWED.fits("lans", variant, hyper)
        and (constants["gradient_normalisation"] == "norm" or not hyper.normalize_grad)
        and (hyper.normalize_grad or constants["second_moment_update"] == "weighted_product")
    )
    return FastLans(config, variant) if fits and plain(param) else None
