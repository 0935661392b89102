"""ScaledAdam on stacks of equal parameters, in place; `statekit.optim.scaled_adam` has the rule.

What is small is left to the text: how a parameter's size is learned. What touches every element is done here, and the
parameter's root mean square only when its turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from statekit.backends import Value, backend
from statekit.optim.scaled_adam import form, sized
from statekit.optim.scaled_adam_clip import reached
from statekit.optim.scaled_adam_forms import Hyperparameters, Setting, at_least, corrected_updates
from statekit.optim.steps import Scene
from statekit.torch.stacks import Stacks, Tensors, by_name, in_stacks, pieces, plain, products, squares

SIZES = ("param_rms", "scale_exp_avg_sq", "scale_grads")


@dataclass(frozen=True)
class FastScaledAdam:
    """The update of parameters that share `own`, what `settle` returned."""

    own: Hyperparameters
    variant: str

    def __call__(
        self,
        scene: Scene,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        slots: Sequence[dict[str, torch.Tensor]],
        common: Value | None,
    ) -> None:
        """Moves parameters and slots, as `statekit.torch.fast.FastMove`."""
        xp = backend("torch")
        s = Setting(xp, form(self.variant), self.own, xp.number(scene.rate), scene.step)
        (beta1, beta2), step = self.own.betas, scene.step
        correction = 1.0 - beta2 ** (step + 1) if step < corrected_updates(beta2) else 1.0
        refreshes = s.period_ends or step == 0

        def kernel(part: slice, stacks: Stacks, rooms: Tensors) -> None:
            p, g, delta, v, y = *(stacks[name] for name in ("param", "grad", "delta", "exp_avg_sq")), rooms[0]
            short = g if common is None else reached(s, g, common)
            used = short if s.form["clip_reaches"] == "everything" else g
            sizes = {name: stacks[name] for name in SIZES}
            rms = sizes["param_rms"]
            if refreshes:
                rms = (squares(p) / p[0].numel()).sqrt_().view_as(rms)
            gradient = products(p, short).view_as(rms)
            after, x = torch.vmap(lambda g, r, sizes: sized(s, g, r, sizes, "float32"))(gradient, rms, sizes)
            factor = at_least(s, after["param_rms"], "float32") * (s.rate * (beta1 - 1.0))
            factor, x = factor.view(-1, 1), x.view(-1, 1) * (1.0 - beta1)
            for p_, g_, delta_, v_, y_ in pieces(p, used, delta, v, y):
                v_.mul_(beta2).addcmul_(g_, g_, value=1.0 - beta2)
                # Corrected before the root is taken: what overflows must do so as in the text.
                root = (
                    torch.sqrt(v_, out=y_) if correction == 1.0 else torch.div(v_, correction, out=y_).sqrt_()
                )
                torch.div(g_, root.add_(self.own.eps), out=y_)
                delta_.mul_(beta1).addcmul_(y_, factor)
                if s.size_due:
                    delta_.addcmul_(p_, x)
                p_.add_(delta_)
            for name in SIZES:
                stacks[name].copy_(after[name])

        names = ("delta", "exp_avg_sq", *SIZES)
        in_stacks(kernel, {"param": params, **by_name(slots, names)}, {"grad": grads})


def fast_scaled_adam(variant: str, own: Hyperparameters, param: torch.Tensor) -> FastScaledAdam | None:
    """Returns the fast path of a parameter, or None if it hasn't one: one of one element."""
    return FastScaledAdam(own, variant) if plain(param) and param.numel() > 1 else None
