"""Makes the files of this folder with Keras 2.15: optimizers beside Adam, and a model of branches.

Run it in an environment of its own with tensorflow-cpu 2.15 (Python 3.10). `slots.npz` has an optimizer's variables by
the names that Keras 2 gives them, with | for /; `now.npz` the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

HERE = Path(__file__).resolve().parent
K = tf.keras
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw_cosine_ema": lambda: K.optimizers.AdamW(
        K.optimizers.schedules.CosineDecay(1e-2, 20), weight_decay=0.03, use_ema=True, clipnorm=1.0
    ),
    "adam_amsgrad": lambda: K.optimizers.Adam(3e-3, beta_1=0.8, amsgrad=True),
    "sgd_ema": lambda: K.optimizers.SGD(
        K.optimizers.schedules.CosineDecay(1e-2, 20), momentum=0.9, use_ema=True
    ),
    "rmsprop": lambda: K.optimizers.RMSprop(1e-3, momentum=0.5, centered=True),
    "legacy_sgd": lambda: K.optimizers.legacy.SGD(1e-2, momentum=0.9, decay=1e-3),
    "legacy_ftrl": lambda: K.optimizers.legacy.Ftrl(1e-2),
    "lion": lambda: K.optimizers.Lion(1e-4),
    "nadam": lambda: K.optimizers.Nadam(1e-3),
    "legacy_nadam": lambda: K.optimizers.legacy.Nadam(1e-3),
    "legacy_adamax_named": lambda: K.optimizers.legacy.Adamax(1e-2, name="mine"),
}


def built(optimizer: Any) -> Any:
    K.utils.set_random_seed(1)
    tokens, features = K.Input((5,), name="tokens"), K.Input((3,), name="features")
    x = K.layers.GRU(6, name="gru")(K.layers.Embedding(11, 4, name="embed")(tokens))
    x = K.layers.LayerNormalization(name="ln")(K.layers.Concatenate()([x, features]))
    frozen = K.layers.Dense(6, name="frozen")
    frozen.trainable = False
    model = K.Model([tokens, features], K.layers.Dense(2, name="head")(frozen(x)))
    model.compile(optimizer, "mse")
    return model


def main() -> None:
    for name, make in OPTIMIZERS.items():
        model = built(make())
        for i in range(4):
            random = np.random.RandomState(i)
            features = [random.randint(0, 11, (8, 5)), random.randn(8, 3).astype("float32")]
            model.train_on_batch(features, random.randn(8, 2).astype("float32"))
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        model.save(folder / "model.h5")
        model.save(folder / "model.keras")
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(folder / "tfckpt" / "ck"))
        made = model.optimizer.variables
        variables = {"slots": made() if callable(made) else made, "now": model.weights}
        for file, values in variables.items():
            np.savez(folder / file, **{value.name.replace("/", "|"): value.numpy() for value in values})


if __name__ == "__main__":
    main()
