"""LANS on stacks of equal parameters, in place; `statekit.optim.lans` has the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from statekit.backends import backend
from statekit.optim import lans
from statekit.optim.adam_moments import CORRECTION, RATE
from statekit.optim.settings import form
from statekit.optim.steps import Scene
from statekit.torch.fast_adamw import Adam
from statekit.torch.stacks import Stacks, Tensors, along, by_name, in_stacks, plain, squares


@dataclass(frozen=True)
class FastLans:
    """The update of parameters that share `own`, what `settle` returned."""

    own: lans.Own
    variant: str

    def __call__(
        self,
        scene: Scene,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        slots: Sequence[dict[str, torch.Tensor]],
        common: Any,
    ) -> None:
        """Moves parameters and slots, as `statekit.torch.fast.FastMove`."""
        xp, hyper, constants = backend("torch"), self.own.hyper, form("lans", self.variant)
        rate = RATE[constants["lr_precision"]](xp, scene.rate) * self.own.lr_mult
        s = lans.Setting(xp, constants, hyper, rate, self.own.wd, scene.step + hyper.begin_num_update)
        c1, root = self._correction(s, hyper.beta1), math.sqrt(self._correction(s, hyper.beta2))
        # The kernel takes 1 - beta in float64; so it gets the weight that the rule has.
        adam = Adam(1.0 - s.first.new, 1.0 - s.second.new, hyper.epsilon * root, root / c1)
        share = lans.SECOND_SHARE[constants["second_half_factor"]](s)

        def kernel(part: slice, stacks: Stacks, rooms: Tensors) -> None:
            (p, g, m, v), (a, b, divisor) = (stacks[name] for name in ("param", "grad", "m", "v")), rooms
            torch.mul(g, xp.constant(hyper.rescale_grad), out=b)
            if hyper.normalize_grad:
                b.div_(along(squares(b).sqrt_(), b))
            adam(-1.0, [a.zero_()], [b], [m], [v])
            b.div_(torch.sqrt(v, out=divisor).add_(adam.epsilon)).mul_(root)
            if s.wd:
                a.add_(p, alpha=s.wd)
                b.add_(p, alpha=s.wd)
            weight = lans.bounded(s, squares(p).sqrt_())
            first = lans.coefficient(s, weight, squares(a).sqrt_(), s.first.old)
            second = lans.coefficient(s, weight, squares(b).sqrt_(), share)
            p.sub_(a.mul_(along(first, a)).addcmul_(b, along(second, b)))

        in_stacks(kernel, {"param": params, **by_name(slots, ("m", "v"))}, {"grad": grads}, rooms=3)

    def _correction(self, s: lans.Setting, beta: float) -> float:
        if not s.hyper.bias_correction:
            return 1.0
        return float(CORRECTION[s.form["constants_precision"]](s.xp, beta, s.count + 1))


def fast_lans(variant: str, own: lans.Own, param: torch.Tensor) -> FastLans | None:
    """Returns the fast path of a parameter, or None if it hasn't one."""
    constants, hyper = form("lans", variant), own.hyper
    fits = (
        constants["second_half_weight"] == "old"
        and constants["norm_accumulation"] != "scaled"
        and (constants["gradient_normalisation"] == "norm" or not hyper.normalize_grad)
        and hyper.clip_gradient is None
        and hyper.grad_averaging
        and hyper.adam_w_mode
    )
    return FastLans(own, variant) if fits and plain(param) else None
