"""Trains under tf.distribute with several replicas, in a process of its own: devices are set up before TensorFlow runs.

python tests/replica_driving.py FOLDER REPLICAS NAMES [short|unreduced|averaged]

It writes FOLDER/<name>_<way>_<replicas>.npz, without a strategy and with so many replicas: weights, slots by path, and
how far the copies of each variable part. What another number of replicas saved there goes on with this number, into
<name>_again_<number before>_<replicas>.npz. `short` is the loop alone. The others are that with a wrong reduction:
each replica keeps its own gradient, or has the mean instead of the sum. A process has one number of replicas:
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


def unreduced(optimizer: Any) -> None:
    """Leaves each replica its own gradient."""
    optimizer._all_reduce_sum_gradients = lambda pairs: pairs


def averaged(optimizer: Any) -> None:
    """Gives the replicas the mean of their gradients."""
    sum_of = optimizer._all_reduce_sum_gradients

    def mean_of(pairs: Any) -> Any:
        count = tf.distribute.get_replica_context().num_replicas_in_sync
        return sum_of([(tf.convert_to_tensor(grad) / count, variable) for grad, variable in pairs])

    optimizer._all_reduce_sum_gradients = mean_of


WRONG = {"unreduced": unreduced, "averaged": averaged}


def looped(strategy: Any, model: Any, updates: range) -> None:
    """Makes updates in a loop of one's own, as TensorFlow's guide writes it."""
    optimizer = model.optimizer

    def step(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.reduce_mean((model(inputs, training=True) - targets) ** 2, -1)) / BATCH
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    run = tf.function(lambda inputs, targets: strategy.run(step, args=(inputs, targets)))
    size = BATCH // strategy.num_replicas_in_sync
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


def main(folder: Path, replicas: int, names: list[str], kind: str) -> None:
    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * replicas)
    several = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    for name in names:
        for strategy in (tf.distribute.get_strategy(), several):
            for way in ("loop",) if kind else ("fit", "loop"):
                trained(strategy, name, way, kind, folder)
        for saved in sorted(folder.glob(f"{name}_loop_*.keras")):
            before = saved.stem.rpartition("_")[2]
            if before != str(replicas) and not kind:
                gone_on(several, saved, folder / f"{name}_again_{before}_{replicas}.npz")


def trained(strategy: Any, name: str, way: str, kind: str, folder: Path) -> None:
    """Trains and saves, unless an earlier process has."""
    made = folder / f"{name}_{way}_{strategy.num_replicas_in_sync}.npz"
    if made.exists():
        return
    with strategy.scope():
        model = model_of(getattr(st, name)(RATE, **OPTIONS[name]))
        model.optimizer.build(model.trainable_variables)
    if kind in WRONG and strategy.num_replicas_in_sync > 1:
        WRONG[kind](model.optimizer)
    if way == "fit":
        fitted(model, range(UPDATES))
    else:
        looped(strategy, model, range(UPDATES))
    written(model, made)
    model.save(made.with_suffix(".keras"))


def gone_on(strategy: Any, saved: Path, made: Path) -> None:
    """Loads what was saved, by Keras and by statekit, and goes on."""
    with strategy.scope():
        model = keras.models.load_model(saved)
    st.attest(model.optimizer, model, saved, strict=True)
    with strategy.scope():
        model.optimizer = st.load_optimizer(saved, model, learning_rate=RATE)
    st.attest(model.optimizer, model, saved, strict=True)
    looped(strategy, model, range(UPDATES, 2 * UPDATES))
    written(model, made)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), "".join(sys.argv[4:]))
