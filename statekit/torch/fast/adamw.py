"""AdamW by PyTorch's own fused kernel: one pass over memory, for every variant of `statekit.optim.adamw`.

The kernel's corrections are switched off by a step so late that they are 1. The real ones go into learning rate and
epsilon, since with k = sqrt(c2) / c1

    a (m / c1) / (sqrt(v / c2) + epsilon) = a k m / (sqrt(v) + epsilon sqrt(c2))

Source: pytorch/pytorch, aten/src/ATen/native/cpu/FusedAdamKernel.cpp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from statekit.arrays.backend import Value
from statekit.optim.adam_family import AdamSetting
from statekit.optim.adamw import AdamWHyperparameters, Setting
from statekit.optim.steps import Scene
from statekit.state.constants import variant_constants
from statekit.torch.fast.batching import Followed, Slots, Stacks, Tensors, by_name, in_stacks, plain, squares

LATE = 2.0**40
"""A step at which no correction is left."""


@dataclass(frozen=True)
class Adam:
    """What the fused kernel is told about both moments.

    Attributes:
        beta1: Decay of the first moment.
        beta2: Decay of the second.
        epsilon: What stands beside the root of the uncorrected second moment.
        factor: What the quotient is multiplied with, beside the learning rate: k above.
    """

    beta1: float
    beta2: float
    epsilon: float
    factor: float

    def __call__(
        self,
        rate: Value,
        params: Tensors,
        grads: Tensors,
        m: Tensors,
        v: Tensors,
        *,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        """Moves moments, and takes rate * (factor * m / (sqrt(v) + epsilon) + weight_decay * param) off parameters."""
        late = torch.full((), LATE, device=params[0].device)
        torch._fused_adamw_(
            list(params), [grad.contiguous() for grad in grads], list(m), list(v), [],
            [late] * len(params), lr=rate * self.factor, beta1=self.beta1, beta2=self.beta2,
            weight_decay=weight_decay / self.factor, eps=self.epsilon, amsgrad=False, maximize=maximize,
        )  # fmt: skip


def direction(adam: Adam, stacks: Stacks, room: torch.Tensor, maximize: bool = False) -> torch.Tensor:
    """Moves the moments, and returns in `room` what Adam steps along, where the rule squares gradients by itself."""
    g, m, v, x = stacks["grad"], stacks["m"], stacks["v"], room.zero_()
    adam(-1.0, [x], [g], [m], [v], maximize=maximize)
    overflow(g, v, x)
    return x


def held(rate: Value, given: Value) -> Value:
    """Returns a learning rate as a number, if it was given as one."""
    return rate if isinstance(given, torch.Tensor) else float(rate)


def overflow(grad: torch.Tensor, v: torch.Tensor, along: torch.Tensor) -> None:
    """Makes second moments infinite, and directions 0, where a gradient's square is more than float32 holds.

    The kernel multiplies with 1 - beta2 first and stays finite; rules that square first don't. Where asking is cheap,
    the sum of squares is asked whether there is anything to do.
    """
    if grad.is_cpu and bool(squares(grad).isfinite().all()):
        return
    over = (grad * grad).isinf() & grad.isfinite()
    v.masked_fill_(over, math.inf)
    along.masked_fill_(over, 0.0)


FOLLOWED = Followed(
    hyper={
        **dict.fromkeys(("beta1", "beta2", "epsilon", "weight_decay_rate", "maximize")),
        "decoupled_weight_decay": None,  # where it isn't and there is a decay, the step is refused
        **dict.fromkeys(
            ("use_ema", "ema_momentum", "ema_overwrite_frequency", "gradient_accumulation_steps")
        ),
        "dtype_momentum": (None, "float32"),
    },
    forms={
        **dict.fromkeys(("step_scope", "amsgrad_of", "repeated_rows")),
        "moments_stored": ("averages",),
        "first_moment_update": ("lerp", "weighted_sum"),
        "bias_correction": ("both", "in_learning_rate", "none"),
        "epsilon_place": ("beside_corrected_root", "beside_uncorrected_root"),
    },
    slots=("m", "v", "v_max", "average"),
)


@dataclass(frozen=True)
class FastAdamW:
    """The update of parameters that share `hyper`, what `settle` returned."""

    hyper: AdamWHyperparameters
    variant: str

    def __call__(self, scene: Scene, params: Tensors, grads: Tensors, slots: Slots, common: Any) -> None:
        hyper, constants = self.hyper, variant_constants("adamw", self.variant)
        s: Setting = AdamSetting.of(scene, constants, hyper)
        c1, c2 = (1.0, 1.0) if s.form["bias_correction"] == "none" else map(float, s.corrections)
        root = math.sqrt(c2)
        beside_corrected = s.form["epsilon_place"] == "beside_corrected_root"
        adam = Adam(hyper.beta1, hyper.beta2, hyper.epsilon * (root if beside_corrected else 1.0), root / c1)
        rate, w = held(s.rate, scene.rate), hyper.weight_decay_rate or 0.0
        named = by_name(slots, ("m", "v"))
        if constants["weight_decay_expression"] != "in_update":
            adam(rate, params, grads, *named.values(), weight_decay=w, maximize=hyper.maximize)
            return

        def kernel(part: slice, stacks: Stacks, rooms: Tensors) -> None:
            # The kernel would round the decayed parameter by itself; here the decay joins the direction.
            p, x = stacks["param"], direction(adam, stacks, rooms[0], hyper.maximize)
            p.sub_(x.add_(p, alpha=w).mul_(rate))

        in_stacks(kernel, {"param": params, **named}, {"grad": grads})


def fast_adamw(variant: str, hyper: AdamWHyperparameters, param: torch.Tensor) -> FastAdamW | None:
    """Returns the fast path of a parameter, or None if it hasn't one.

    The kernel loses a NaN in v_max, and m + (g - m) (1 - beta1) is closer to m than the sums that it takes. Rules that
    square the gradient by itself have their decay in the update.
    """
    constants = variant_constants("adamw", variant)
    product = constants["second_moment_update"] == "weighted_product"
    decays = constants["weight_decay_expression"] in (
        ("product_first", "in_update") if product else ("in_update",)
    )
    fits = decays and FOLLOWED.fits("adamw", variant, hyper)
    return FastAdamW(hyper, variant) if fits and plain(param) else None
