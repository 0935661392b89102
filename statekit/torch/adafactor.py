"""Adafactor as a torch.optim.Optimizer."""

from __future__ import annotations

from typing import Unpack, final

from statekit.dropin.options import AdafactorOptions, documented
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.torch.optimizer import Params, Rate, SchemaOptimizer


@documented("adafactor", "t5x")
@final
class Adafactor(SchemaOptimizer):
    """Moves parameters as one of the Adafactors does; by default as T5X's.

    The state of a parameter is `v_row` and `v_col`, or `v`, and with momentum `m`: zeros from the moment the parameter
    is added, so leave frozen parameters out. In T5X's variant they are float32, `m` is in `dtype_momentum`. Each group
    counts its updates in `step`: every call of `step` counts, whatever the gradients are. Where the variant counts
    the updates of each parameter by itself (hf, fairseq, torch), one without a gradient falls behind.

    The learning rate is the one before parameter scale. T5X never steps without a schedule, so there is no default:
    `step` raises until every group has an `lr`, but for variants that have a rate of their own (t2t_early, t2t_late,
    mesh_tf; hf and fairseq with `relative_step`). With `multiply_by_parameter_scale` steps are relative to the size of
    the parameter, without it they are absolute. T5X's usual schedule, for an optimizer with lr=1.0:
    `LambdaLR(optimizer, lambda step: max(step, 10_000) ** -0.5)`.

    Not every variant offers every option; what isn't given is as the variant has it (schemas/adafactor.json).

    Args:
        params: `model.named_parameters()`, or groups whose `params` are (name, parameter); options of a group
            outweigh those below.
        lr: Learning rate: a number, a 0-d tensor, or None if it is given later.
        variant: Whose rule: t5x, t2t_early, t2t_late, mesh_tf, hf, fairseq, torch, optax or keras.
        foreach: Whether equal parameters are moved together; if not, each by itself, bit for bit as replay does.
        {options}

    Raises:
        StateError: There is no such variant, or it can't be stepped.
        UsageError: Parameters without names, of rank 3 and more without a rule, or options that can't be.

    Source: T5X t5x/adafactor.py, `Adafactor`; of the other variants the sources in schemas/adafactor.json.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(4, 3)
        >>> optimizer = Adafactor(linear.named_parameters(), lr=1e-3)
        >>> linear(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.param_groups[0]["step"]
        1
    """

    def __init__(
        self,
        params: Params,
        lr: Rate = None,
        *,
        variant: str = "t5x",
        foreach: bool = True,
        **options: Unpack[AdafactorOptions],
    ) -> None:
        super().__init__(params, lr, variant, foreach, options)

    @staticmethod
    def _schema() -> OptimizerSchema:
        return load_schema("adafactor")
