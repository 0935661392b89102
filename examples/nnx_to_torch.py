"""A run of Flax NNX with Optax goes on in PyTorch with the same losses.

python examples/nnx_to_torch.py [NEW_FOLDER]     # statekit[jax,torch], flax
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import torch
from flax import nnx

import statekit.torch

OUT = Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp()).absolute()


class Net(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jnp.ndarray) -> jnp.ndarray:
        return self.down(jnp.tanh(self.up(x)))


def loss(net: Net, rows: np.ndarray, labels: np.ndarray) -> jnp.ndarray:
    """The mean squared error."""
    return jnp.mean((net(rows) - labels) ** 2)


x = np.random.default_rng(0).normal(size=(4, 16, 8)).astype("float32")
batches = [(rows, rows.sum(1, keepdims=True)) for rows in x]
net = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(net, optax.adamw(1e-2, weight_decay=0.1), wrt=nnx.Param)


def train() -> list[float]:
    """Does four updates; returns the loss before each."""
    losses = []
    for batch in batches:
        value, grads = nnx.value_and_grad(loss)(net, *batch)
        optimizer.update(net, grads)
        losses.append(float(value))
    return losses


train()
tree = {
    "params": nnx.to_pure_dict(nnx.state(net, nnx.Param)),
    "opt_state": nnx.to_pure_dict(nnx.state(optimizer)),
}
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(OUT / "run", tree)
expected = train()

# Optax stores neither its name nor its hyperparameters: what the program says, the conversion must be told.
hparams = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
print(statekit.convert(OUT / "run", OUT / "run.pt", map="flax:torch", optimizer="adamw", hparams=hparams))
other = torch.nn.ModuleDict({"up": torch.nn.Linear(8, 16), "down": torch.nn.Linear(16, 1)})
statekit.torch.load_params(OUT / "run.pt", other)
adamw = statekit.torch.load_optimizer(OUT / "run.pt", other.named_parameters(), lr=1e-2)
reached = []
for rows, labels in batches:
    adamw.zero_grad()
    y = other["down"](torch.tanh(other["up"](torch.from_numpy(rows))))
    value = torch.nn.functional.mse_loss(y, torch.from_numpy(labels))
    value.backward()
    adamw.step()
    reached.append(value.item())
print(f"losses in JAX {expected}, in PyTorch {reached}")
np.testing.assert_allclose(reached, expected, rtol=1e-5)
