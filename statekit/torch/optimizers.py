"""The optimizers as `torch.optim.Optimizer`. Each class names its schema, its usual variant and its options.

Options have canonical names and are those of the variant, as `schemas/<optimizer>.json` explains them; what isn't given
is as the variant has it.
"""

from __future__ import annotations

from typing import Unpack, final

from statekit.dropin.options import (
    AdafactorOptions,
    AdamWOptions,
    LambOptions,
    LansOptions,
    MuonOptions,
    ScaledAdamOptions,
    documented,
)
from statekit.torch.optimizer import Params, Rate, SchemaOptimizer

ARGUMENTS = """
Not every variant offers every option; what isn't given is as the variant has it.

Args:
    params: `model.named_parameters()`, or groups whose `params` are (name, parameter); options of a group
        outweigh those below.
    lr: Learning rate: a number, a 0-d tensor, or None if it is given later.
    variant: Whose rule: {variants}.
    foreach: Whether equal parameters are moved together; if not, each by itself, bit for bit as replay does.
    {options}

Raises:
    StateError: There is no such variant, or it can't be stepped.
    UsageError: Parameters without names or without a rule that their rank needs, or options that can't be.
"""
"""What all take, as their docstrings have it."""


@documented("adafactor", "t5x", ARGUMENTS)
@final
class Adafactor(SchemaOptimizer):
    """Adafactor in any of its variants; by default T5X's.

    The state of a parameter is `v_row` and `v_col`, or `v`, and with momentum `m`: zeros from the moment the parameter
    is added, so leave frozen parameters out. In T5X's variant they are float32, `m` is in `dtype_momentum`. Each group
    counts its updates in `step`: every call of `step` counts, whatever the gradients are. Where the variant counts
    the updates of each parameter by itself (hf, fairseq, torch), one without a gradient falls behind.

    The learning rate is the one before parameter scale. T5X never steps without a schedule, so there is no default:
    `step` raises until every group has an `lr`, but for variants that have a rate of their own (t2t_early, t2t_late,
    mesh_tf; hf and fairseq with `relative_step`). With `multiply_by_parameter_scale` steps are relative to the size of
    the parameter, without it they are absolute. T5X's usual schedule, for an optimizer with lr=1.0:
    `LambdaLR(optimizer, lambda step: max(step, 10_000) ** -0.5)`.

    {arguments}

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

    SCHEMA = "adafactor"

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


@documented("adamw", "torch", ARGUMENTS)
@final
class AdamW(SchemaOptimizer):
    """Moves parameters by AdamW as PyTorch, Optax, Keras, Mesh-TensorFlow or GPT-Neo has it; by default as PyTorch.

    The state of a parameter is `m` and `v`, with `amsgrad` also `v_max`, and with `use_ema` its `average`. Each group
    counts its updates in `step`; in PyTorch's variant a parameter without a gradient falls behind. `step` raises until
    every group has an `lr`.

    {arguments}

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

    SCHEMA = "adamw"

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


@documented("lamb", "optax", ARGUMENTS)
@final
class LAMB(SchemaOptimizer):
    """Moves parameters by LAMB (You et al. 2019) as Optax or Keras has it.

    The state of a parameter is `m` and `v`, float32 as the parameter, and with `use_ema` its `average`. Each group
    counts its updates in `step`. `step` raises until every group has an `lr`.

    {arguments}

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

    SCHEMA = "lamb"

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


@documented("lans", "mxnet_fused", ARGUMENTS)
@final
class LANS(SchemaOptimizer):
    """Moves parameters by LANS (Zheng et al. 2020): LAMB with Nesterov's momentum, each gradient normalised.

    The state of a parameter is `m` and `v` in float32, and with `multi_precision` a float32 `master` beside each
    parameter in float16 or bfloat16; MXNet itself has none beside bfloat16. Each group counts its updates in `step`; in
    MXNet's variants a parameter without a gradient falls behind. `step` raises until every group has an `lr`.

    The paper's variant has no defaults: give it `beta1`, `beta2`, `epsilon` and `wd`.

    {arguments}

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

    SCHEMA = "lans"

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


@documented("muon", "torch", ARGUMENTS)
@final
class Muon(SchemaOptimizer):
    """Moves matrices by Muon (Jordan et al. 2024) as one of its implementations has it; by default as PyTorch.

    The state of a parameter is its momentum buffer `m`, a mean or a sum of the gradients by the variant, and with
    `use_ema` its `average`. Matrices of one shape are orthogonalized together. Each group counts its updates in `step`;
    Optax' variant corrects its momentum by it. `step` raises until every group has an `lr`.

    It moves matrices alone: embeddings, heads, biases and norms go to another optimizer. `statekit.torch.Partition` has
    both in one, with groups as Keller Jordan's classes take them.

    {arguments}

    Source: pytorch/pytorch, torch/optim/_muon.py; of the other variants the sources in schemas/muon.json.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(4, 3)
        >>> optimizer = Muon([("weight", linear.weight)], lr=1e-3, adjust_lr_fn="match_rms_adamw")
        >>> linear(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[linear.weight])
        ['m']
    """

    SCHEMA = "muon"

    def __init__(
        self,
        params: Params,
        lr: Rate = None,
        *,
        variant: str = "torch",
        foreach: bool = True,
        **options: Unpack[MuonOptions],
    ) -> None:
        super().__init__(params, lr, variant, foreach, options)


@documented("scaled_adam", "zip2025", ARGUMENTS)
@final
class ScaledAdam(SchemaOptimizer):
    """Moves parameters as one of the generations of icefall's ScaledAdam does; by default as the newest.

    The state of a parameter is `delta` and `exp_avg_sq`, and of one with several elements `param_rms`,
    `scale_exp_avg_sq` and `scale_grads`, a buffer as long as `size_update_period`. With `clipping_scale` a group has
    `slots` of its own: `model_norms`, `model_norm_threshold` and `num_clipped`. A parameter without a gradient moves as
    if its gradient were zero. Each group counts its updates in `step`.

    `step` raises until every group has an `lr`, relative to the size of a parameter; icefall's default is 0.03, and its
    recipes use Eden's schedule.

    {arguments}

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

    SCHEMA = "scaled_adam"

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
