"""Every optimizer of optax and optax.contrib: recognised, or refused by its name or those that it may be."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zoo import answer, answers

pytestmark = [
    pytest.mark.jax,
    pytest.mark.filterwarnings("ignore:Specifying a key:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "d": {"kernel": (8, 6), "bias": (6,)},
    "o": {"kernel": (6, 4)},
}
RATE, UPDATES, CI_DRAWS = 0.01, 3, 3
ADAM = ("adam", "adamax", "radam", "nadam", "yogi", "adabelief", "adopt")
GOES_ON = {
    "adafactor": "adafactor",
    "adamw": "adamw",
    "adamaxw": "adamaxw",
    "corrected rmsprop": "rmsprop",
    "nadamw": "nadamw",
    "acprop": "acprop",
    "amsgrad": "adamw",
    "lamb": "lamb",
    "muon": "muon",
}
"""What PyTorch goes on with, each with what it is called; where adamw is assumed, its name is among the others."""
NAMES = {
    "adadelta": "Adadelta",
    "adagrad": "Adagrad",
    "adan": "Adan",
    "ademamix": "AdEMAMix",
    "cocob": "COCOB",
    "dadapt_adamw": "D-Adaptation AdamW",
    "dog": "DoG",
    "dowg": "DoWG",
    "dpsgd": "DP-SGD",
    "fromage": "Fromage",
    "galore": "GaLore",
    "lars": "LARS",
    "lbfgs": "L-BFGS",
    "lion": "Lion",
    "lookahead": "lookahead",
    "madgrad": "MADGRAD",
    "mechanize": "mechanize",
    "momo": "MoMo",
    "momo_adam": "MoMo-Adam",
    "noisy_sgd": "noisy SGD",
    "novograd": "NovoGrad",
    "optimistic_adam": "scale_by_optimistic_gradient",
    "optimistic_adam_v2": "scale_by_optimistic_gradient",
    "optimistic_gradient_descent": "optimistic gradient descent",
    "polyak_sgd": "Polyak SGD",
    "prodigy": "Prodigy",
    "rmsprop": "RMSprop",
    "rprop": "Rprop",
    "sam": "sam",
    "schedule_free_adamw": "schedule_free",
    "schedule_free_sgd": "schedule_free",
    "sgd": "SGD without momentum",
    "sign_sgd": "SGD without momentum, or sign SGD",
    "signum": "Signum",
    "simplified_ademamix": "simplified AdEMAMix",
    "sm3": "SM3",
    "sophia": "Sophia",
    **{name: name for name in ADAM},
}
"""What the others are called. Of those without slots, the form of the chain tells which they may be."""
LINKS = {"scale_by_madgrad", "schedule_free"}
"""What takes a rate and is no optimizer: a link, and what stands around one."""
TARGETS = {"out.pt": [], "orbax": ["--to", "orbax"], "neutral": ["--to", "statekit"]}


def library() -> dict[str, Callable[..., Any]]:
    """Returns what makes each optimizer."""
    import optax
    from optax import contrib

    return {**vars(contrib), **vars(optax)}


def zoo() -> list[str]:
    """Returns the names of all optimizers, as the sources of Optax have them."""
    return sorted({*GOES_ON, *NAMES})


def made(name: str) -> Any:
    """Returns an optimizer with its own defaults."""
    import optax
    from optax import contrib

    wrappers: dict[str, Callable[[], Any]] = {
        "lookahead": lambda: optax.lookahead(optax.adam(RATE), 3, 0.5),
        "mechanize": lambda: contrib.mechanize(optax.adam(RATE)),
        "corrected rmsprop": lambda: optax.rmsprop(RATE, centered=True, bias_correction=True),
        "sam": lambda: contrib.sam(optax.adam(RATE), optax.sgd(0.1)),
        "dpsgd": lambda: optax.contrib.dpsgd(RATE, l2_norm_clip=1.0, noise_multiplier=0.1, seed=0),
    }
    make: Callable[..., Any] = wrappers.get(name) or library()[name]
    takes_rate = "learning_rate" in inspect.signature(make).parameters
    return make(learning_rate=RATE) if takes_rate else make()


def drawn(seed: int, size: float) -> dict[str, dict[str, Any]]:
    draws = np.random.default_rng(seed)
    return {
        name: {key: (size * draws.normal(size=shape)).astype(np.float32) for key, shape in inner.items()}
        for name, inner in SHAPES.items()
    }


def trained(name: str) -> Mapping[str, Any]:
    """Returns parameters and state after three updates."""
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.with_extra_args_support(made(name))
    params = jax.tree.map(jnp.asarray, drawn(0, 0.3))
    params = optax.LookaheadParams.init_synced(params) if name == "lookahead" else params
    state = optimizer.init(params)
    value = jnp.float32(1.0)

    def loss(tree: Any) -> Any:
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))

    more: dict[str, Any] = {
        "sophia": {"obj_fn": loss},
        **{kind: {"value": value} for kind in ("momo", "momo_adam", "polyak_sgd")},
    }
    for seed in range(UPDATES):
        grads = drawn(10 + seed, 0.1)
        if name == "lbfgs":
            value, grads = jax.value_and_grad(loss)(params)
            more[name] = {"value": value, "grad": grads, "value_fn": loss}
        if name == "dpsgd":  # a gradient of each example
            grads = jax.tree.map(lambda grad: grad[None], grads)
        updates, state = optimizer.update(grads, state, params, **more.get(name, {}))
        params = optax.apply_updates(params, updates)
    # Flax keeps the numbers of a random key
    plain = jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, state)
    return {"params": params, "opt_state": plain, "step": UPDATES}


def _is_key(leaf: Any) -> bool:
    import jax

    return hasattr(leaf, "dtype") and bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def check(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sends a state through every verb."""
    from flax import serialization

    path = tmp_path / "run.msgpack"
    path.write_bytes(serialization.to_bytes(trained(name)))
    if name == "lookahead":  # it has two sets of parameters: the user names one
        done = answer(capsys, "convert", path, tmp_path / "out.pt")
        assert done.code == 3 and "params/fast, params/slow" in done.text
        return
    given = answers(path, TARGETS, tmp_path, capsys)
    abroad = given.converted["out.pt"]
    if name in GOES_ON:
        assert abroad.code == 0, abroad.text
        assert GOES_ON[name] in abroad.text
        assert given.verified["out.pt"].code == 0
    else:
        assert abroad.code in (2, 3), abroad.text
        assert NAMES[name] in abroad.text
    for target in ("orbax", "neutral"):
        assert given.converted[target].code == 0, given.converted[target].text
    assert answer(capsys, "resume", path).code == 0


@pytest.mark.parametrize("name", random.Random(0).sample(zoo(), CI_DRAWS))
def test_a_drawn_optimizer_is_recognised_or_refused_by_its_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(name, tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo())
def test_each_optimizer_is_recognised_or_refused_by_its_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(name, tmp_path, capsys)


def test_the_zoo_has_every_optimizer_of_optax() -> None:
    names = {name for name, make in library().items() if _is_alias(make) and not name.startswith("_")}
    assert names - LINKS <= {*zoo()}


def _is_alias(make: Any) -> bool:
    """Tells whether something makes an optimizer: it takes a rate, and belongs to the aliases or to contrib."""
    module = getattr(make, "__module__", "") or ""
    is_there = module == "optax._src.alias" or module.startswith("optax.contrib.")
    return is_there and inspect.isfunction(make) and "learning_rate" in inspect.signature(make).parameters
