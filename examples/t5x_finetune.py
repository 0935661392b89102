"""Finetuning from a T5X checkpoint in three frameworks: the second moment's decay starts anew.

python examples/t5x_finetune.py [NEW_FOLDER]     # statekit[torch,jax,tensorflow]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import keras
import numpy as np
import tensorflow as tf
import torch

import statekit
import statekit.jax
import statekit.tensorflow
import statekit.torch

OUT = Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp())
OUT.mkdir(parents=True, exist_ok=True)
subprocess.run([sys.executable, "-m", "statekit", "demo", "--sample", str(OUT)], check=True)

# T5X' `step_offset`: the decay is that of update 1 again, so that finetuning forgets the old second moment.
report = statekit.convert(OUT / "t5x-ckpt", OUT / "finetune.pt", step_offset="reset")
print(report.plan.headline)
with statekit.open(OUT / "finetune.pt") as state:
    weights = {name: tensor.read() for name, tensor in state.params.items()}
generator = np.random.default_rng(0)
grads = {name: generator.normal(size=weight.shape).astype(weight.dtype) for name, weight in weights.items()}

# PyTorch.
model = {name: torch.nn.Parameter(torch.from_numpy(weight.copy())) for name, weight in weights.items()}
optimizer = statekit.torch.load_optimizer(OUT / "finetune.pt", model.items(), lr=1e-3)
for name, param in model.items():
    param.grad = torch.from_numpy(grads[name])
optimizer.step()
in_torch = {name: param.detach().numpy() for name, param in model.items()}

# JAX.
params = {name: jax.numpy.asarray(weight) for name, weight in weights.items()}
transformation, opt_state = statekit.jax.load_optimizer(OUT / "finetune.pt", params, learning_rate=1e-3)
updates, opt_state = transformation.update(grads, opt_state, params)
in_jax = {name: np.asarray(params[name] + updates[name]) for name in params}

# TensorFlow.
variables = {name: keras.Variable(weight, name=name.replace("/", "_")) for name, weight in weights.items()}
names = {variable.path: name for name, variable in variables.items()}
keras_optimizer = statekit.tensorflow.load_optimizer(
    OUT / "finetune.pt", [*variables.values()], names=names, learning_rate=1e-3
)
keras_optimizer.apply([tf.constant(grads[name]) for name in variables], [*variables.values()])
in_tensorflow = {name: variable.numpy() for name, variable in variables.items()}

for other in (in_jax, in_tensorflow):
    distance = max(float(np.abs(other[name] - in_torch[name]).max()) for name in weights)
    moved = max(float(np.abs(weights[name] - in_torch[name]).max()) for name in weights)
    print(f"the update moved weights by up to {moved:.3g}; from PyTorch's it is at most {distance:.1g} away")
    # Weights are float32: the last bit of one is more than 1e-5 of this update.
    assert distance < 1e-4 * moved
