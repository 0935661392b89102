"""Makes the files of this folder: what Keras 2.15 leaves of a run, and the weights that it has three updates later.

Run it in an environment of its own with tensorflow-cpu 2.15.1 (Python 3.10).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

HERE = Path(__file__).resolve().parent
K = tf.keras
FORMS = {"adam": ("model.keras", "only.weights.h5", "weights_ckpt"), "legacy_sched": ()}
SCHEDULE = K.optimizers.schedules.ExponentialDecay(1e-2, 10, 0.9)
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: K.optimizers.Adam(1e-2),
    "legacy_adam": lambda: K.optimizers.legacy.Adam(1e-2, decay=1e-3),
    "adamw": lambda: K.optimizers.AdamW(1e-2, weight_decay=0.05),
    "legacy_sched": lambda: K.optimizers.legacy.Adam(SCHEDULE),
    "adafactor": lambda: K.optimizers.Adafactor(1e-2),
    "amsgrad_clip": lambda: K.optimizers.Adam(1e-2, amsgrad=True, global_clipnorm=1.0, use_ema=True),
    "loss_scale": lambda: K.optimizers.Adam(1e-2),
}


def built(optimizer: Any) -> Any:
    K.utils.set_random_seed(0)
    layers = [K.layers.Dense(6, activation="tanh", name="hidden"), K.layers.BatchNormalization(name="bn")]
    model = K.Sequential([K.Input((8,)), *layers, K.layers.Dense(4, name="out")])
    model.compile(optimizer, "mse")
    return model


def trained(model: Any, first: int, count: int) -> None:
    for i in range(first, first + count):
        random = np.random.RandomState(i)
        x, y = random.randn(16, 8).astype("float32"), random.randn(16, 4).astype("float32")
        model.train_on_batch(x, y)


for name, make in OPTIMIZERS.items():
    K.mixed_precision.set_global_policy("mixed_float16" if name == "loss_scale" else "float32")
    model = built(make())
    trained(model, 0, 5)
    folder = HERE / name
    for form in ("model.h5", *FORMS.get(name, ("model.keras",))):
        save = model.save if form.startswith("model") else model.save_weights
        save(str(folder / form))
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(folder / "tfckpt" / "ck"))
    trained(model, 5, 3)
    np.savez(folder / "expected.npz", **{weight.name: weight.numpy() for weight in model.weights})
