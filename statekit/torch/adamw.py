"""AdamW as a torch.optim.Optimizer."""

from __future__ import annotations

from typing import Unpack, final

from statekit.dropin.options import AdamWOptions, documented
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.torch.optimizer import Params, Rate, SchemaOptimizer


@documented("adamw", "torch")
@final
class AdamW(SchemaOptimizer):
    """Moves parameters by AdamW as PyTorch, Optax, Keras, Mesh-TensorFlow or GPT-Neo has it; by default as PyTorch.

    The state of a parameter is `m` and `v`, with `amsgrad` also `v_max`, and with `use_ema` its `average`. Each group
    counts its updates in `step`; in PyTorch's variant a parameter without a gradient falls behind. `step` raises until
    every group has an `lr`.

    Not every variant offers every option; what isn't given is as the variant has it (schemas/adamw.json).

    Args:
        params: `model.named_parameters()`, or groups whose `params` are (name, parameter); options of a group
            outweigh those below.
        lr: Learning rate: a number, a 0-d tensor, or None if it is given later.
        variant: Whose rule: torch, optax, keras, mesh_tf or gpt_neo.
        foreach: Whether equal parameters are moved together; if not, each by itself, bit for bit as replay does.
        {options}

    Raises:
        StateError: There is no such variant, or it can't be stepped.
        UsageError: Parameters without names, or options that can't be.

    Source: pytorch/pytorch, torch/optim/adamw.py; of the other variants the sources in schemas/adamw.json.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(4, 3)
        >>> optimizer = AdamW(linear.named_parameters(), lr=1e-3, amsgrad=True)
        >>> linear(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[linear.weight])
        ['m', 'v', 'v_max']
    """

    def __init__(
        self,
        params: Params,
        lr: Rate = None,
        *,
        variant: str = "torch",
        foreach: bool = True,
        **options: Unpack[AdamWOptions],
    ) -> None:
        super().__init__(params, lr, variant, foreach, options)

    @staticmethod
    def _schema() -> OptimizerSchema:
        return load_schema("adamw")
