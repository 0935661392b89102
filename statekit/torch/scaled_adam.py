"""ScaledAdam as a torch.optim.Optimizer."""

from __future__ import annotations

from typing import Unpack, final

from statekit.dropin.options import ScaledAdamOptions, documented
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.torch.optimizer import Params, Rate, SchemaOptimizer


@documented("scaled_adam", "zip2025")
@final
class ScaledAdam(SchemaOptimizer):
    """Moves parameters as one of the generations of icefall's ScaledAdam does; by default as the newest.

    The state of a parameter is `delta` and `exp_avg_sq`, and of one with several elements `param_rms`,
    `scale_exp_avg_sq` and `scale_grads`, a buffer as long as `size_update_period`. With `clipping_scale` a group has
    `slots` of its own: `model_norms`, `model_norm_threshold` and `num_clipped`. A parameter without a gradient moves as
    if its gradient were zero. Each group counts its updates in `step`.

    `step` raises until every group has an `lr`; icefall's default is 0.03, and its recipes use Eden's schedule.

    Args:
        params: `model.named_parameters()`, or groups whose `params` are (name, parameter); options of a group
            outweigh those below.
        lr: Learning rate, relative to the size of a parameter: a number, a 0-d tensor, or None if it is given later.
        variant: Whose rule: gptsovits, pt7, zip202305, zip202310, zip202407 or zip2025. States look alike in all.
        foreach: Whether equal parameters are moved together; if not, each by itself, bit for bit as replay does.
        {options}

    Raises:
        StateError: There is no such variant, or it can't be stepped.
        UsageError: Parameters without names, or options that can't be.

    Source: k2-fsa/icefall, egs/librispeech/ASR/zipformer/optim.py, `ScaledAdam`; of the other variants the sources in
    schemas/scaled_adam.json.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(4, 3)
        >>> optimizer = ScaledAdam(linear.named_parameters(), lr=0.03, clipping_scale=2.0)
        >>> linear(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.param_groups[0]["slots"])
        ['model_norm_threshold', 'model_norms', 'num_clipped']
    """

    def __init__(
        self,
        params: Params,
        lr: Rate = None,
        *,
        variant: str = "zip2025",
        foreach: bool = True,
        **options: Unpack[ScaledAdamOptions],
    ) -> None:
        super().__init__(params, lr, variant, foreach, options)

    @staticmethod
    def _schema() -> OptimizerSchema:
        return load_schema("scaled_adam")
