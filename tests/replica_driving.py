"""Trains under tf.distribute with several replicas, in a process of its own: devices are set up before TensorFlow runs.

python tests/replica_driving.py FOLDER REPLICAS NAMES [short|wrong]

It writes FOLDER/<name>_<way>_<replicas>.npz, without a strategy and with so many replicas: weights, slots by path, and
how far the copies of each variable part. What it finds saved there goes on too, into <name>_again_<replicas>.npz.
`short` is the loop alone; `wrong` leaves each replica its own gradient. A process has one number:
TensorFlow's collective operations fail where two groups share a device.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import statekit.tensorflow as st

OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay_rate": 0.1},
    "LAMB": {},
    "LANS": {},
    "Adafactor": {},
    "ScaledAdam": {},
}
UPDATES, BATCH, RATE = 3, 8, 0.01


def model_of(optimizer: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Embedding(9, 6, name="rows"),
        keras.layers.Flatten(),
        keras.layers.Dense(4, name="out"),
    ]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    model.compile(optimizer, "mse")
    return model


def batch(i: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(i)
    return random.randint(0, 9, (BATCH, 3)).astype("int32"), random.randn(BATCH, 4).astype("float32")


def fitted(model: Any, updates: range) -> None:
    inputs, targets = (np.concatenate(part) for part in zip(*map(batch, updates), strict=True))
    model.fit(inputs, targets, batch_size=BATCH, shuffle=False, verbose=0)


def looped(strategy: Any, model: Any, updates: range, wrong: bool = False) -> None:
    """Makes updates in a loop of one's own, as TensorFlow's guide writes it.

    `wrong` leaves each replica its own gradient.
    """
    optimizer = model.optimizer

    def step(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.reduce_mean((model(inputs, training=True) - targets) ** 2, -1)) / BATCH
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    run = tf.function(lambda inputs, targets: strategy.run(step, args=(inputs, targets)))
    size = BATCH // strategy.num_replicas_in_sync
    if wrong:
        optimizer._all_reduce_sum_gradients = lambda pairs: pairs
    for i in updates:
        inputs, targets = batch(i)

        def part(array: np.ndarray) -> Any:
            return strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(array[size * context.replica_id_in_sync_group :][:size])
            )

        run(part(inputs), part(targets))


def written(model: Any, path: Path) -> None:
    values: dict[str, Any] = {_ending(variable.path): np.asarray(variable) for variable in model.variables}
    for key, kept in model.optimizer.slots().items():
        values |= {f"slot/{_ending(key)}/{name}": np.asarray(slot) for name, slot in kept.items()}
    apart = 0.0
    for variable in (*model.variables, *model.optimizer.variables):
        copies = [copy.numpy() for copy in getattr(variable.value, "values", ())]
        apart = max([apart, *(float(np.abs(copy - copies[0]).max()) for copy in copies if copy.size)])
    values["apart"] = apart
    np.savez(path, **values)


def _ending(path: str) -> str:
    """Returns a variable's name without that of its model, which Keras numbers anew."""
    return "/".join(path.split("/")[-2:])


def main(folder: Path, replicas: int, names: list[str], way_of: str) -> None:
    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * replicas)
    several = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    wrong = way_of == "wrong"
    for name in names:
        for strategy in (several,) if wrong else (tf.distribute.get_strategy(), several):
            count = strategy.num_replicas_in_sync
            for way in ("loop",) if way_of else ("fit", "loop"):
                with strategy.scope():
                    model = model_of(getattr(st, name)(RATE, **OPTIONS[name]))
                    model.optimizer.build(model.trainable_variables)
                fitted(model, range(UPDATES)) if way == "fit" else looped(
                    strategy, model, range(UPDATES), wrong
                )
                written(model, folder / f"{name}_{way}_{count}.npz")
                model.save(folder / f"{name}_{way}_{count}.keras")
        # those of other numbers of replicas go on, too
        for saved in () if way_of else sorted(folder.glob(f"{name}_loop_*.keras")):
            with several.scope():
                model = keras.models.load_model(saved)
            st.attest(model.optimizer, model, saved, strict=True)
            with several.scope():
                model.optimizer = st.load_optimizer(saved, model, learning_rate=RATE)
            st.attest(model.optimizer, model, saved, strict=True)
            looped(several, model, range(UPDATES, 2 * UPDATES))
            written(model, folder / f"{name}_again_{saved.stem.rpartition('_')[2]}.npz")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), "".join(sys.argv[4:]))
