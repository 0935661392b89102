"""Runs of Keras on TensorFlow for resuming.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resuming_run import DECAY, RATE, UPDATES, Run, Values

from statekit.attestation.attestation import Attestation
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Hints
from statekit.state.schedules.call_text import parse_call

SCHEDULES = {
    "PolynomialDecay": f"PolynomialDecay({RATE}, 20, end_learning_rate={RATE / 4}, power=1.5)",
    "its own schedule": f"optax.exponential_decay({RATE}, 2, 0.7, staircase=True, end_value={0.4 * RATE})",
}


class KerasRun(Run):
    """Keras on TensorFlow: AdamW, dense layers and batch statistics, one layer inside another model."""

    def begin(self) -> None:
        import keras

        keras.utils.set_random_seed(1)
        layers = keras.layers
        body = [
            layers.Dense(4, name="fc1"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(4, name="fc2"),
        ]
        if self.kind == "sequential":
            end = layers.Dense(2, use_bias=False, name="out")
            self.model = keras.Sequential([keras.Input((4,)), *body, end], name="net")
        else:
            inputs = keras.Input((4,), name="inputs")
            inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="inner")], name="enc")
            x = inner(inputs)
            for layer in body:
                x = layer(x)
            x = layers.Dropout(0.1, name="drop", seed=3)(x)
            self.model = keras.Model(inputs, layers.Dense(2, use_bias=False, name="out")(x), name="net")
        self.scope = {"model": self.model, "loss": "mse"}

    @property
    def call(self) -> str | None:
        """The call that makes the run's schedule: Keras' own, or one that Keras has no class for."""
        return SCHEDULES.get(self.kind.rpartition(", ")[2])

    def rate(self) -> Any:
        """Returns what the program gives its optimizer: a rate, or the schedule that the printed lines made."""
        import keras

        if self.call is None:
            return RATE
        if "schedule" in self.scope:
            return self.scope["schedule"]

        class Fallen(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
            def __call__(self, step: Any) -> Any:
                return keras.ops.maximum(RATE * 0.7 ** (keras.ops.cast(step, "float32") // 2), 0.4 * RATE)

        return eval(self.call, vars(keras.optimizers.schedules)) if "optax" not in self.call else Fallen()

    def fresh_optimizer(self, drop_in: bool = False) -> Any:
        import keras

        import statekit.tensorflow

        rate = self.rate()
        if drop_in:
            return statekit.tensorflow.AdamW(rate, variant="keras", weight_decay_rate=DECAY)
        return keras.optimizers.AdamW(rate, weight_decay=DECAY)

    def source(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        import tensorflow as tf

        self.begin()
        for variable in self.model.non_trainable_variables:
            if variable.dtype == "float32":
                variable.assign(variable + 0.25)
        self.scope["optimizer"] = self.fresh_optimizer()
        self.model.compile(self.scope["optimizer"], "mse")
        self.optimizer.build(self.model.trainable_variables)
        self.update(0)
        schedule = None if self.call is None else parse_call(self.call)
        # These files say neither.
        like: dict[str, Any] = {"hints": Hints({"weight_decay": DECAY}, schedule=schedule)}
        if "by path" not in self.kind:
            other = KerasRun(self.container, self.layout, self.kind)
            other.begin()
            h5 = self.container == "keras-h5"
            like["like"] = folder / ("like.weights.h5" if h5 else "like.keras")
            (other.model.save_weights if h5 else other.model.save)(like["like"])
        if self.container == "tf-bundle":
            self.model.save_weights(folder / "source.weights.h5")
            return folder / "source.weights.h5", like
        tf.train.Checkpoint(model=self.model, optimizer=self.optimizer).save(str(folder / "source" / "ckpt"))
        return folder / "source", like

    @property
    def optimizer(self) -> Any:
        return self.scope.get("optimizer") or self.scope["model"].optimizer

    def update(self, done: int) -> None:
        import tensorflow as tf

        moved = self.scope["model"].trainable_variables
        for number in range(done, done + UPDATES):
            assert int(self.optimizer.iterations) == number
            grads = self.gradients(number, [tuple(v.shape) for v in moved])
            self.optimizer.apply([tf.constant(grad) for grad in grads], moved)

    def values(self) -> Values:
        return [v.numpy() for v in self.scope["model"].variables if v.dtype == "float32"]

    def attested(self, path: Path, hints: CheckpointRef) -> Attestation:
        import statekit.tensorflow

        model, said = self.scope["model"], dict(hints.hyperparameters)
        return statekit.tensorflow.attest(self.optimizer, model, path, hparams=said)

    def save(self, folder: Path) -> None:
        import tensorflow as tf

        model = self.scope["model"]
        if self.container == "keras-h5":
            model.save_weights(folder / "again.weights.h5")
        elif self.container == "keras":
            model.save(folder / "again.keras")
        else:
            tf.train.Checkpoint(model=model, optimizer=self.optimizer).save(str(folder / "again" / "ckpt"))

    def load(self, folder: Path) -> None:
        import keras
        import tensorflow as tf

        if self.container == "keras":
            self.scope = {"model": keras.models.load_model(folder / "again.keras")}
            return
        schedule = self.scope.get("schedule")
        self.begin()
        self.scope |= {} if schedule is None else {"schedule": schedule}
        drop_in = "statekit" in self.layout or "by path" in self.kind
        self.scope["optimizer"] = self.fresh_optimizer(drop_in)
        self.model.compile(self.optimizer, "mse")
        self.optimizer.build(self.model.trainable_variables)
        if self.container == "keras-h5":
            self.model.load_weights(folder / "again.weights.h5")
        else:
            prefix = tf.train.latest_checkpoint(folder / "again")
            checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer)
            checkpoint.restore(prefix).assert_existing_objects_matched()
