"""A run of Optax with an optimizer for each group: what it saves, and how it goes on itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from statekit.tensors.tensor import Array

SHAPES = {
    "emb/kernel": (160, 144),
    "head/kernel": (144, 8),
    "norm/scale": (16,),
    "norm/bias": (16,),
    "still": (3,),
}
LABELS = {
    "emb/kernel": "big",
    "head/kernel": "big",
    "norm/scale": "small",
    "norm/bias": "small",
    "still": "fixed",
}
BIG, SMALL = {"learning_rate": 1e-2, "momentum": 0.9}, {"learning_rate": 1e-3, "weight_decay": 0.1}
SAVED, ALL = 3, 6
WRAPPERS = ("bare", "chain", "accumulated", "injected")


def nested(values: Mapping[str, Any]) -> Any:
    root: dict[str, Any] = {}
    for path, value in values.items():
        *above, last = path.split("/")
        node = root
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return root


def flat(tree: Any) -> dict[str, Array]:
    """Returns the leaves of a tree by path, in the order of `SHAPES`."""
    arrays = {}
    for path in SHAPES:
        node = tree
        for key in path.split("/"):
            node = node[key]
        arrays[path] = np.asarray(node)
    return arrays


class Run:
    """Three updates of Optax' Adafactor for matrices and AdamW for vectors, and three more."""

    def __init__(self, wrapper: str = "bare") -> None:
        random = np.random.default_rng(1)
        self.wrapper = wrapper
        self.start = {path: random.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}
        self.grads = [
            {path: random.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}
            for _ in range(2 * ALL)
        ]

    @cached_property
    def optimizer(self) -> Any:
        import optax

        rules = {
            "big": optax.adafactor(**BIG),
            "small": optax.adamw(**SMALL),
            "fixed": optax.set_to_zero(),
        }
        labels = nested(LABELS)
        if self.wrapper == "injected":
            static = ("dtype_momentum", "min_dim_size_to_factor")
            rules["big"] = optax.inject_hyperparams(optax.adafactor, static)(**BIG)
            rules["small"] = optax.inject_hyperparams(optax.adamw)(**SMALL)
        parts = optax.partition(rules, labels)
        return {
            "chain": lambda: optax.chain(optax.clip_by_global_norm(10.0), parts),
            "accumulated": lambda: optax.MultiSteps(parts, 2).gradient_transformation(),
        }.get(self.wrapper, lambda: parts)()

    def gone(self, params: Any, state: Any, first: int, last: int, optimizer: Any = None) -> tuple[Any, Any]:
        """Makes updates `first` to `last`; with accumulation each takes two gradients."""
        import jax
        import jax.numpy as jnp
        import optax

        update = jax.jit((optimizer or self.optimizer).update)
        each = 2 if self.wrapper == "accumulated" else 1
        for grads in self.grads[first * each : last * each]:
            updates, state = update(nested(jax.tree.map(jnp.asarray, grads)), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    @cached_property
    def saved(self) -> tuple[Any, Any]:
        """Parameters and state after `SAVED` updates."""
        import jax
        import jax.numpy as jnp

        params = jax.tree.map(jnp.asarray, nested(self.start))
        return self.gone(params, self.optimizer.init(params), 0, SAVED)

    @cached_property
    def ended(self) -> tuple[Any, Any]:
        """Parameters and state after `ALL` updates."""
        return self.gone(*self.saved, SAVED, ALL)

    def save(self, folder: Path, container: str) -> Path:
        """Saves the run with the container's own library."""
        params, state = self.saved
        return saved(folder, container, params, state)


def saved(folder: Path, container: str, params: Any, state: Any) -> Path:
    """Saves parameters and a state of Optax with the container's own library."""
    tree = {"params": params, "opt_state": state}
    if container == "orbax":
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder.absolute(), tree)
        return folder
    from flax import serialization

    folder.mkdir()
    (folder / f"checkpoint_{SAVED}").write_bytes(serialization.to_bytes(tree))
    return folder / f"checkpoint_{SAVED}"
