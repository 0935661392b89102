"""LAMB as a torch.optim.Optimizer."""

from __future__ import annotations

from typing import Unpack, final

from statekit.dropin.options import LambOptions, documented
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.torch.optimizer import Params, Rate, SchemaOptimizer


@documented("lamb", "optax")
@final
class LAMB(SchemaOptimizer):
    """Moves parameters by LAMB (You et al. 2019) as Optax or Keras has it.

    The state of a parameter is `m` and `v`, float32 as the parameter, and with `use_ema` its `average`. Each group
    counts its updates in `step`. `step` raises until every group has an `lr`.

    Not every variant offers every option; what isn't given is as the variant has it (schemas/lamb.json).

    Args:
        params: `model.named_parameters()`, or groups whose `params` are (name, parameter); options of a group
            outweigh those below.
        lr: Learning rate: a number, a 0-d tensor, or None if it is given later.
        variant: Whose rule: optax or keras.
        foreach: Whether equal parameters are moved together; if not, each by itself, bit for bit as replay does.
        {options}

    Raises:
        StateError: There is no such variant, or it can't be stepped.
        UsageError: Parameters without names, or options that can't be.

    Source: google-deepmind/optax, optax/_src/alias.py, `lamb`; keras-team/keras, keras/src/optimizers/lamb.py.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(4, 3)
        >>> optimizer = LAMB(linear.named_parameters(), lr=1e-3, weight_decay_rate=0.01)
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
        variant: str = "optax",
        foreach: bool = True,
        **options: Unpack[LambOptions],
    ) -> None:
        super().__init__(params, lr, variant, foreach, options)

    @staticmethod
    def _schema() -> OptimizerSchema:
        return load_schema("lamb")
