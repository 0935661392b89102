"""The optimizers of `steps.py` in JAX: one jitted update, parameters and state donated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax
from steps import Entrant, Entrants

import statekit.jax as ours

RATE = 1e-3


def _entrant(rule: str, make: Callable[..., Any], mine: bool = False, most: int = 10_000) -> Entrant:
    def begin(count: int, side: int) -> Callable[[], object]:
        names = [f"layer_{i}" for i in range(count)]
        keys = jax.random.split(jax.random.key(0), count)
        grads = {name: jax.random.normal(key, (side, side)) for name, key in zip(names, keys, strict=True)}
        params = {name: grad[::-1] * 0.1 for name, grad in grads.items()}
        transformation = make(learning_rate=RATE)
        arrays = [params, transformation.init(params)]

        @partial(jax.jit, donate_argnums=(0, 1))
        def update(params: Any, state: Any, grads: Any) -> Any:
            updates, state = transformation.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def step() -> object:
            arrays[:] = update(*arrays, grads)
            return jax.block_until_ready(arrays)

        return step

    return Entrant(rule, begin, mine, most)


ENTRANTS: Entrants = {
    "optax adamw": _entrant("adamw", optax.adamw),
    "optax adafactor": _entrant("adafactor", optax.adafactor, most=400),
    "optax lamb": _entrant("lamb", optax.lamb),
    "adafactor": _entrant("adafactor", ours.adafactor, True),
    "adamw": _entrant("adamw", ours.adamw, True),
    "lamb": _entrant("lamb", ours.lamb, True),
    "lans": _entrant("lans", ours.lans, True),
    "scaled_adam": _entrant("scaled_adam", ours.scaled_adam, True),
}
"""With 2 000 matrices optax.adafactor compiles for minutes."""
