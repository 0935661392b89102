"""LANS as a torch.optim.Optimizer."""

from __future__ import annotations

from typing import Unpack, final

from statekit.dropin.options import LansOptions, documented
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.torch.optimizer import Params, Rate, SchemaOptimizer


@documented("lans", "mxnet_fused")
@final
class LANS(SchemaOptimizer):
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
        {options}

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
        **options: Unpack[LansOptions],
    ) -> None:
        super().__init__(params, lr, variant, foreach, options)

    @staticmethod
    def _schema() -> OptimizerSchema:
        return load_schema("lans")
