"""Makes the files of this folder beside itself with Keras 3.15.1 on TensorFlow: a model of float16 with a loss scale.

`expected.npz` has its weights and moments, by the names of variables.
"""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent


def main() -> None:
    """Trains six updates in two epochs, and saves."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(units, dtype="mixed_float16") for units in (4, 4, 1)]
    model = keras.Sequential([keras.layers.Input((4,)), *layers])
    inner = keras.optimizers.AdamW(0.01, weight_decay=0.02, beta_1=0.8)
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0), "mse")
    features = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
    callback = keras.callbacks.OrbaxCheckpoint(str(HERE / "orbax"), save_on_background=False)
    model.fit(features, features[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    model.save(HERE / "model.keras")
    model.save(HERE / "model.h5")
    model.save_weights(HERE / "model.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(HERE / "tf" / "ckpt"))
    variables = [*model.trainable_variables, *inner.variables]
    named: Any = {variable.path.rpartition("sequential/")[2]: np.array(variable) for variable in variables}
    np.savez(HERE / "expected.npz", **{name.replace("/", "|"): value for name, value in named.items()})
    print([*named])


def factored() -> None:
    """Saves a run of Adafactor, which has no placeholders within a loss scale."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, dtype="mixed_float16")])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adafactor(0.01)), "mse")
    features = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    model.fit(features, features[:, :2], batch_size=4, verbose=0)
    model.save(HERE / "adafactor.keras")


if __name__ == "__main__":
    main()
    factored()
