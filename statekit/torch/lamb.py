"""LAMB as a torch.optim.Optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from statekit.dropin.by_name import UNSET, Unset, given
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.torch.optimizer import Engine, Params, Rate


@final
class LAMB(Engine):
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
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: What is added to the root of the second moment.
        epsilon_root: What is added inside that root.
        weight_decay_rate: Weight decay; None for none.
        exclude_from_weight_decay: Regexes of parameters that aren't decayed: searched in the path (slashes for dots),
            in Keras' variant in its last part; in Optax's also {name: bool}.
        global_norm_clip_threshold: Largest norm of all gradients of a group together.
        clipnorm: Largest norm of each gradient.
        clipvalue: Largest absolute value of each element of a gradient.
        loss_scale_factor: What gradients are divided by first.
        use_ema: Whether an average of the parameters is kept.
        ema_momentum: Decay of that average.
        ema_overwrite_frequency: Updates after which averages replace the parameters.

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
        beta1: float | Unset = UNSET,
        beta2: float | Unset = UNSET,
        epsilon: float | Unset = UNSET,
        epsilon_root: float | Unset = UNSET,
        weight_decay_rate: float | Unset | None = UNSET,
        exclude_from_weight_decay: Sequence[str] | Mapping[str, bool] | Unset | None = UNSET,
        global_norm_clip_threshold: float | Unset | None = UNSET,
        clipnorm: float | Unset | None = UNSET,
        clipvalue: float | Unset | None = UNSET,
        loss_scale_factor: float | Unset | None = UNSET,
        use_ema: bool | Unset = UNSET,
        ema_momentum: float | Unset | None = UNSET,
        ema_overwrite_frequency: int | Unset | None = UNSET,
    ) -> None:
        super().__init__(params, lr, variant, foreach, given(locals()))

    @staticmethod
    def _schema() -> OptimizerSchema:
        return load_schema("lamb")
