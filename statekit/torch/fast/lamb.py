"""LAMB on stacks of equal parameters, in place; `statekit.optim.lamb` has the rule.

PyTorch's fused kernel moves both moments where they are, and leaves the direction in a stack of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from statekit.optim.adam_family import AdamHyperparameters, AdamSetting
from statekit.optim.lamb import RATIO, Setting
from statekit.optim.steps import Scene
from statekit.state.constants import variant_constants
from statekit.torch.fast.adamw import Adam, direction
from statekit.torch.fast.batching import (
    Followed,
    Slots,
    Stacks,
    Tensors,
    along,
    by_name,
    in_stacks,
    plain,
    squares,
)
from statekit.torch.fast.numba_runner import Items, in_reach, pieces_of

FOLLOWED = Followed(
    hyper=dict.fromkeys(
        (
            "beta1", "beta2", "epsilon", "weight_decay_rate",
            "use_ema", "ema_momentum", "ema_overwrite_frequency", "gradient_accumulation_steps",
        )
    ),
    forms={
        **dict.fromkeys(("step_scope", "repeated_rows", "trust_ratio_fallback")),
        "moment_update": ("weighted_sum",),
        "epsilon_place": ("beside_corrected_root",),
        "weight_decay_form": ("lr_and_ratio",),
        "weight_decay_place": ("in_direction",),
        "trust_ratio_on": ("all",),
        "norm_reads": ("before_update",),
    },
    slots=("m", "v", "average"),
)  # fmt: skip


@dataclass(frozen=True)
class FastLamb:
    """The update of parameters that share `hyper`, what `settle` returned."""

    hyper: AdamHyperparameters
    variant: str

    def __call__(self, scene: Scene, params: Tensors, grads: Tensors, slots: Slots, common: Any) -> None:
        hyper, constants = self.hyper, variant_constants("lamb", self.variant)
        s: Setting = AdamSetting.of(scene, constants, hyper)
        c1, c2 = map(float, s.corrections)
        moments = by_name(slots, ("m", "v"))
        items = [params, [grad.contiguous() for grad in grads], *moments.values()]
        cuts = pieces_of(params)
        if in_reach(items, cuts):
            self._in_loops(s, c1, c2, items, cuts)
            return
        adam = Adam(hyper.beta1, hyper.beta2, hyper.epsilon * math.sqrt(c2), math.sqrt(c2) / c1)
        w = hyper.weight_decay_rate or 0.0

        def kernel(part: slice, stacks: Stacks, rooms: Tensors) -> None:
            p, x = stacks["param"], direction(adam, stacks, rooms[0])
            if w:
                x.add_(p, alpha=w)
            norms = squares(p).sqrt_(), squares(x).sqrt_()
            ratio = RATIO[constants["trust_ratio_fallback"]](s.xp, *norms, 1.0)
            p.addcmul_(x, along(ratio * s.rate, p), value=-1.0)

        in_stacks(kernel, {"param": params, **moments}, {"grad": grads})

    def _in_loops(self, s: Setting, c1: float, c2: float, items: Sequence[Tensors], cuts: int) -> None:
        """Moves parameters, their gradients and slots where they lie, in pieces; c1 and c2 correct the moments."""
        from statekit.torch.fast import numba_kernels

        hyper, params = s.hyper, items[0]
        loops = Items.of(items, (params[0].numel() // cuts,))
        sums = params[0].new_empty((len(params), cuts, 2))
        corrections, w = (1.0 / c1, 1.0 / c2, hyper.epsilon), hyper.weight_decay_rate or 0.0
        betas = hyper.beta1, 1.0 - hyper.beta1, hyper.beta2, 1.0 - hyper.beta2
        loops.run(numba_kernels.lamb_moments, sums.view(-1, 2), w, *betas, *corrections)
        weight, total = sums.sum(1).sqrt_().unbind(1)
        size = RATIO[s.form["trust_ratio_fallback"]](s.xp, weight, total, 1.0) * s.rate
        loops.run(numba_kernels.lamb_params, size.repeat_interleave(cuts), w, *corrections)


def fast_lamb(variant: str, hyper: AdamHyperparameters, param: torch.Tensor) -> FastLamb | None:
    """Returns the fast path of a parameter, or None if it hasn't one; see `fast_adamw` for the moments' form."""
    return FastLamb(hyper, variant) if FOLLOWED.fits("lamb", variant, hyper) and plain(param) else None
