"""Runs of Optax for resuming.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from resuming_run import RATE, UPDATES, Run, Values

from statekit.attestation.attestation import Attestation
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Hints

PLAIN: dict[str, Any] = {"min_dim_size_to_factor": 2, "multiply_by_parameter_scale": False}
TOLD: dict[str, dict[str, Any]] = {
    "tree": {"learning_rate": RATE, "b1": 0.8, "weight_decay": 1e-4},
    "adafactor": {"learning_rate": RATE, **PLAIN},
    "adafactor, momentum": {"learning_rate": RATE, **PLAIN, "momentum": 0.9},
}
"""What an optimizer's state doesn't say."""


class JaxRun(Run):
    """Optax: AdamW on a tree of two layers."""

    def begin(self) -> None:
        import jax.numpy as jnp

        random = np.random.default_rng(99)
        shapes = {"kernel": (4, 3), "bias": (3,)}
        self.scope = {
            "params": {
                layer: {
                    name: jnp.asarray(random.normal(size=shape), jnp.float32)
                    for name, shape in shapes.items()
                }
                for layer in ("first", "second")
            }
        }

    def source(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        import optax
        import orbax.checkpoint as ocp

        self.begin()
        optimizer = {
            "tree": lambda: optax.adamw(RATE, b1=0.8),
            "adafactor": lambda: optax.adafactor(RATE, **PLAIN),
            "adafactor, momentum": lambda: optax.adafactor(RATE, **PLAIN, momentum=0.9),
        }[self.kind]()
        params = self.scope["params"]
        self.scope |= {
            "optimizer": optimizer,
            "state": {"params": params, "opt_state": optimizer.init(params)},
        }
        self.update(0)
        with ocp.StandardCheckpointer() as saver:
            saver.save(folder.absolute() / "source" / "3" / "default", self.scope["state"])
        return folder / "source", {"hints": Hints(TOLD[self.kind])}

    def update(self, done: int) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        optimizer, state = self.scope["optimizer"], self.scope["state"]
        params, slots = state["params"], state["opt_state"]
        leaves, tree = jax.tree.flatten(params)
        for number in range(done, done + UPDATES):
            grads = [jnp.asarray(grad) for grad in self.gradients(number, [leaf.shape for leaf in leaves])]
            updates, slots = optimizer.update(jax.tree.unflatten(tree, grads), slots, params)
            params = optax.apply_updates(params, updates)
        self.scope["state"] = {"params": params, "opt_state": slots}

    def values(self) -> Values:
        import jax

        return [np.asarray(leaf) for leaf in jax.tree.leaves(self.scope["state"]["params"])]

    def loaded(self) -> Values:
        if "state" not in self.scope:
            raise AssertionError("the lines give no state")
        return self.values()

    def attested(self, path: Path, hints: CheckpointRef) -> Attestation:
        import statekit.jax

        state, said = self.scope["state"], dict(hints.hyperparameters)
        return statekit.jax.attest(state["params"], state["opt_state"], path, hparams=said)

    def save(self, folder: Path) -> None:
        import orbax.checkpoint as ocp
        from flax.training import checkpoints

        if self.container == "flax":
            checkpoints.save_checkpoint(folder.absolute() / "again", self.scope["state"], 6)
            return
        with ocp.StandardCheckpointer() as saver:
            saver.save(folder.absolute() / "again", self.scope["state"])

    def load(self, folder: Path) -> None:
        import orbax.checkpoint as ocp
        from flax.training import checkpoints

        optimizer = self.scope["optimizer"]
        self.begin()
        params = self.scope["params"]
        target = {"params": params, "opt_state": optimizer.init(params)}
        if self.container == "flax":
            state = checkpoints.restore_checkpoint(folder.absolute() / "again", target)
        else:
            state = ocp.StandardCheckpointer().restore(folder.absolute() / "again", target)
        self.scope |= {"optimizer": optimizer, "state": state}
