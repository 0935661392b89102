"""A run of Transformers' Trainer goes on in JAX with Optax' AdamW.

python examples/trainer_to_optax.py [NEW_FOLDER]     # statekit[hf,jax]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
import transformers

import statekit
import statekit.hf
import statekit.jax

OUT = Path(sys.argv[1] if sys.argv[1:] else tempfile.mkdtemp())


class Net(torch.nn.Module):
    """Two layers that give their own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        y = self.down(torch.tanh(self.up(x)))
        return {"loss": (y - labels).pow(2).mean(), "logits": y}


def loss(params: Any, x: Any, labels: Any) -> Any:
    """The same in JAX, in Flax' names."""
    hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    return jnp.mean((hidden @ params["down"]["kernel"] + params["down"]["bias"] - labels) ** 2)


class InOrder(transformers.Trainer):  # type: ignore[misc]  # its base is untyped
    """Takes the rows in their order."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


torch.manual_seed(0)
x = torch.randn(64, 8)
labels = x.sum(1, keepdim=True)
args = transformers.TrainingArguments(
    str(OUT / "run"), max_steps=8, save_steps=4, logging_steps=1, per_device_train_batch_size=8, learning_rate=0.01,
    lr_scheduler_type="constant", weight_decay=0.1, max_grad_norm=0, report_to="none", use_cpu=True, disable_tqdm=True,
)  # fmt: skip
data = [{"x": x[i], "labels": labels[i]} for i in range(64)]
# Trainer's own files only number the optimizer's parameters: the callback writes their names beside them.
trainer = InOrder(Net(), args, train_dataset=data, callbacks=[statekit.hf.NamesCallback()])
trainer.train()
expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

# JAX goes on from update 4. `torch:flax` turns Linear's weights, and their slots, into Dense's kernels.
report = statekit.convert(
    OUT / "run/checkpoint-4", OUT / "optax-run", to="orbax", layout="optax", map="torch:flax"
)
print(report.plan.headline)
shapes = {"up": (8, 16), "down": (16, 1)}
like = {name: {"kernel": jnp.zeros(shape), "bias": jnp.zeros(shape[1])} for name, shape in shapes.items()}
params = statekit.jax.load_params(OUT / "optax-run", like)
optimizer, state = statekit.jax.load_optimizer(OUT / "optax-run", params, learning_rate=0.01)
for number in range(4, 8):
    rows = slice(8 * number, 8 * number + 8)
    value, grads = jax.value_and_grad(loss)(params, x[rows].numpy(), labels[rows].numpy())
    print(f"update {number + 1}: Trainer {float(expected[number]):.4f}, JAX {value:.4f}")
    assert abs(value - float(expected[number])) < 1e-4 * value
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
