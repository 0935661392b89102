"""LANS as a torch.optim.Optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from statekit.dropin.by_name import UNSET, Unset, given
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.torch.optimizer import Engine, Params, Rate


@final
class LANS(Engine):
    """Moves parameters by LANS (Zheng et al. 2020): LAMB with Nesterov's momentum, each gradient normalised.

    The state of a parameter is `m` and `v` in float32, and with `multi_precision` a float32 `master` beside each
    float16 parameter. Each group counts its updates in `step`; in MXNet's variants a parameter without a gradient falls
    behind. `step` raises until every group has an `lr`.

    Not every variant offers every option; what isn't given is as the variant has it (schemas/lans.json). The paper's
    has no defaults: give it `beta1`, `beta2`, `epsilon` and `wd`.

    Args:
        params: `model.named_parameters()`, or groups whose `params` are (name, parameter); options of a group
            outweigh those below.
        lr: Learning rate: a number, a 0-d tensor, or None if it is given later.
        variant: Whose rule: mxnet_fused, mxnet_unfused, mxnet_gpu, paper or apex_fused. States look alike in all.
        foreach: Whether equal parameters are moved together; if not, each by itself, bit for bit as replay does.
        beta1: Decay of the first moment, and weight of the first half of the update.
        beta2: Decay of the second moment.
        epsilon: What is added to the root of the second moment.
        wd: Weight decay.
        lower_bound: Smallest weight norm in the trust ratios; None for none.
        upper_bound: Largest weight norm in the trust ratios; None for none.
        clip_gradient: Largest absolute value of an element of the normalised gradient; None for none.
        rescale_grad: Factor of gradients before anything else.
        lr_mult: Factors of the learning rate, {name: number}.
        wd_mult: Factors of the weight decay, {name: number}.
        multi_precision: Whether float16 parameters have a float32 master.
        begin_num_update: Count that every parameter starts from.
        bias_correction: Whether moments are corrected for their zero start.
        grad_averaging: Whether a gradient enters the first moment with 1 - beta1 instead of 1.
        normalize_grad: Whether gradients are divided by their norm.
        adam_w_mode: Whether weight decay is added to the direction instead of to the gradient.

    Raises:
        StateError: There is no such variant, or it can't be stepped.
        UsageError: Parameters without names, or options that can't be.

    Source: arXiv 2006.13484, algorithm 2; apache/mxnet, src/operator/contrib/multi_lans.cc and
    python/mxnet/optimizer/lans.py; of the other variants the sources in schemas/lans.json.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(4, 3)
        >>> optimizer = LANS(linear.named_parameters(), lr=1e-3, wd=0.01, wd_mult={"bias": 0.0})
        >>> linear(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[linear.weight])
        ['m', 'v']
    """

    def __init__(
        self,
        params: Params,
        lr: Rate = None,
        *,
        variant: str = "mxnet_fused",
        foreach: bool = True,
        beta1: float | Unset = UNSET,
        beta2: float | Unset = UNSET,
        epsilon: float | Unset = UNSET,
        wd: float | Unset = UNSET,
        lower_bound: float | Unset | None = UNSET,
        upper_bound: float | Unset | None = UNSET,
        clip_gradient: float | Unset | None = UNSET,
        rescale_grad: float | Unset = UNSET,
        lr_mult: Mapping[str, float] | Unset = UNSET,
        wd_mult: Mapping[str, float] | Unset = UNSET,
        multi_precision: bool | Unset = UNSET,
        begin_num_update: int | Unset = UNSET,
        bias_correction: bool | Unset = UNSET,
        grad_averaging: bool | Unset = UNSET,
        normalize_grad: bool | Unset = UNSET,
        adam_w_mode: bool | Unset = UNSET,
    ) -> None:
        super().__init__(params, lr, variant, foreach, given(locals()))

    @staticmethod
    def _schema() -> OptimizerSchema:
        return load_schema("lans")
