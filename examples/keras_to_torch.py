"""A run of Keras goes on in PyTorch with the same losses.

python examples/keras_to_torch.py [NEW_FOLDER]     # statekit[tensorflow,torch]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import torch

import statekit
import statekit.torch

OUT = Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp())
OUT.mkdir(parents=True, exist_ok=True)
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
y = x.sum(1, keepdims=True)

# Keras does four updates and saves; then four more, to compare.
layers = [keras.layers.Dense(16, activation="tanh", name="up"), keras.layers.Dense(1, name="down")]
model = keras.Sequential([keras.layers.Input((8,)), *layers])
model.compile(keras.optimizers.AdamW(1e-2), "mse")
batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)]
for batch in batches:
    model.train_on_batch(*batch)
model.save(OUT / "run.keras")
expected = []
for batch in batches:
    model.train_on_batch(*batch)
    expected.append(float(model.evaluate(*batch, verbose=0)))

# PyTorch goes on. Keras' Dense is stored transposed; `keras:torch` says how modules of one become those of the other.
report = statekit.convert(OUT / "run.keras", OUT / "run.pt", map="keras:torch")
print(report.plan.headline)
net = torch.nn.ModuleDict({"up": torch.nn.Linear(8, 16), "down": torch.nn.Linear(16, 1)})
statekit.torch.load_params(OUT / "run.pt", net)
optimizer = statekit.torch.load_optimizer(OUT / "run.pt", net.named_parameters())


def loss(rows: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    """Keras' mean squared error."""
    out = net["down"](torch.tanh(net["up"](torch.from_numpy(rows))))
    return (out - torch.from_numpy(labels)).pow(2).mean()


reached = []
for batch in batches:
    optimizer.zero_grad()
    loss(*batch).backward()
    optimizer.step()
    reached.append(loss(*batch).item())

for number, (keras_loss, torch_loss) in enumerate(zip(expected, reached, strict=True), 5):
    print(f"update {number}: Keras {keras_loss:.6f}, PyTorch {torch_loss:.6f}")
np.testing.assert_allclose(reached, expected, rtol=1e-5)
