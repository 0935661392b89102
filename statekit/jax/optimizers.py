"""The optimizers, as functions that return an `optax.GradientTransformation`.

Each follows the rule of one `variant`; options have canonical names and are those of the variant, as
`schemas/<optimizer>.json` explains them; what isn't given is as the variant has it. Numbers may be arrays, e.g. under
`optax.inject_hyperparams`, where they don't decide shapes. `updates` are float32 or wider: `optax.apply_updates` rounds
parameters of low precision once, to what the rule makes of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar, Unpack

import optax

from statekit.dropin.options import (
    OPTIONS,
    AdafactorOptions,
    AdamWOptions,
    LambOptions,
    LansOptions,
    MuonOptions,
    ScaledAdamOptions,
    documented,
)
from statekit.jax.transformation import Rate, transformation

ARGUMENTS = """
Args:
    learning_rate: A number, a 0-d array, a schedule of the updates done, or None: then every update raises, but for
        variants that have a rate of their own (Adafactor's t2t_early, t2t_late and mesh_tf; hf and fairseq with
        `relative_step`).
    variant: Whose rule: {variants}.
    {options}

Raises:
    NotFoundError: There is no such variant.
    StateError: The variant can't be stepped.
    UsageError: Options that can't be; lists every one.
"""
"""What all take, as their docstrings have it."""
Maker = TypeVar("Maker", bound=Callable[..., optax.GradientTransformation])


def takes_options(schema: str, usual: str) -> Callable[[Maker], Maker]:
    """Returns a decorator that explains an optimizer's options, and names each in its signature.

    `optax.inject_hyperparams` binds arguments by the signature, and hands every one on: `...` stands for one that
    wasn't given.
    """

    def named(make: Maker) -> Maker:
        signature = inspect.signature(make)
        arguments = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        names = OPTIONS[schema].__annotations__
        options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=...) for name in names]
        make.__signature__ = signature.replace(parameters=[*arguments, *options])  # type: ignore[attr-defined]  # a function
        return make

    return lambda make: documented(schema, usual, ARGUMENTS)(named(make))


@takes_options("adafactor", "t5x")
def adafactor(
    learning_rate: Rate = None, *, variant: str = "t5x", **options: Unpack[AdafactorOptions]
) -> optax.GradientTransformation:
    """Adafactor as one of its implementations has it; by default T5X's. Its state is an AdafactorState.

    The learning rate is the one before parameter scale: with `multiply_by_parameter_scale` steps are relative to the
    size of the parameter, without it they are absolute. T5X's usual schedule is
    `lambda n: jnp.maximum(n, 10_000) ** -0.5`.

    {arguments}

    Source: T5X t5x/adafactor.py, `Adafactor`; of the other variants the sources in schemas/adafactor.json.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"kernel": jnp.ones((256, 128)), "bias": jnp.ones(128)}
        >>> state = adafactor(1e-2).init(params)
        >>> state.v_row["kernel"].shape, state.v["kernel"], state.v["bias"].shape
        ((128,), MaskedNode(), (128,))
    """
    return transformation("adafactor", variant, learning_rate, options)


@takes_options("scaled_adam", "zip2025")
def scaled_adam(
    learning_rate: Rate = None, *, variant: str = "zip2025", **options: Unpack[ScaledAdamOptions]
) -> optax.GradientTransformation:
    """One of the generations of icefall's ScaledAdam; by default the newest. Its state is a ScaledAdamState.

    {arguments}

    Source: k2-fsa/icefall, egs/librispeech/ASR/zipformer/optim.py, `ScaledAdam`; of the other variants the sources in
    schemas/scaled_adam.json.

    Example:
        >>> import jax.numpy as jnp
        >>> scaled_adam(0.03, clipping_scale=2.0).init({"kernel": jnp.ones((4, 3))}).model_norms.shape
        (100,)
    """
    return transformation("scaled_adam", variant, learning_rate, options)


@takes_options("lans", "mxnet_fused")
def lans(
    learning_rate: Rate = None, *, variant: str = "mxnet_fused", **options: Unpack[LansOptions]
) -> optax.GradientTransformation:
    """LANS (Zheng et al. 2020): LAMB with Nesterov's momentum, each gradient normalised. Its state is a LansState.

    The paper's variant has no defaults: give it `beta1`, `beta2`, `epsilon` and `wd`.

    {arguments}

    Source: arXiv 2006.13484, algorithm 2; apache/mxnet, src/operator/contrib/multi_lans.cc and
    python/mxnet/optimizer/lans.py; of the other variants the sources in schemas/lans.json.
    """
    return transformation("lans", variant, learning_rate, options)


@takes_options("lamb", "optax")
def lamb(
    learning_rate: Rate = None, *, variant: str = "optax", **options: Unpack[LambOptions]
) -> optax.GradientTransformation:
    """LAMB (You et al. 2019) as Optax or Keras has it. Its state is a LambState.

    {arguments}

    Source: google-deepmind/optax, optax/_src/alias.py, `lamb`; keras-team/keras, keras/src/optimizers/lamb.py.
    """
    return transformation("lamb", variant, learning_rate, options)


@takes_options("adamw", "optax")
def adamw(
    learning_rate: Rate = None, *, variant: str = "optax", **options: Unpack[AdamWOptions]
) -> optax.GradientTransformation:
    """AdamW as Optax, PyTorch, Keras, Mesh-TensorFlow or GPT-Neo has it; by default Optax'. Its state is an AdamWState.

    {arguments}

    Source: pytorch/pytorch, torch/optim/adamw.py; of the other variants the sources in schemas/adamw.json.
    """
    return transformation("adamw", variant, learning_rate, options)


@takes_options("muon", "optax")
def muon(
    learning_rate: Rate = None, *, variant: str = "optax", **options: Unpack[MuonOptions]
) -> optax.GradientTransformation:
    """Muon as Optax, PyTorch, Keller Jordan, Moonlight, Keras or Emerging-Optimizers has it; by default Optax'.

    It moves matrices alone; `optax.partition` gives the other leaves to another optimizer, as `optax.contrib.muon` does
    by itself. Its state is a MuonState.

    {arguments}

    Source: google-deepmind/optax, optax/contrib/_muon.py; of the other variants the sources in schemas/muon.json.
    """
    return transformation("muon", variant, learning_rate, options)
