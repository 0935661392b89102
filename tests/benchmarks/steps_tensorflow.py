"""The optimizers of `steps.py` in TensorFlow: Keras optimizers, one compiled call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import statekit.tensorflow as ours  # isort: skip  (chooses Keras' backend)
import keras
import tensorflow as tf
from steps import Entrant, Entrants

RATE = 1e-3


def _entrant(rule: str, make: Callable[..., Any], mine: bool = False, most: int = 10_000) -> Entrant:
    def begin(count: int, side: int) -> Callable[[], object]:
        random = tf.random.Generator.from_seed(0)
        grads = [random.normal((side, side)) for _ in range(count)]
        params = [keras.Variable(grad[::-1] * 0.1, name=f"layer_{i}") for i, grad in enumerate(grads)]
        optimizer = make(learning_rate=RATE)
        optimizer.build(params)
        update = tf.function(lambda: optimizer.apply(grads))

        def step() -> object:
            update()
            return params[-1].numpy()

        return step

    return Entrant(rule, begin, mine, most)


ENTRANTS: Entrants = {
    "keras AdamW": _entrant("adamw", keras.optimizers.AdamW),
    "keras Adafactor": _entrant("adafactor", keras.optimizers.Adafactor, most=400),
    "keras Lamb": _entrant("lamb", keras.optimizers.Lamb),
    "Adafactor": _entrant("adafactor", ours.Adafactor, True),
    "AdamW": _entrant("adamw", ours.AdamW, True),
    "LAMB": _entrant("lamb", ours.LAMB, True),
    "LANS": _entrant("lans", ours.LANS, True),
    "ScaledAdam": _entrant("scaled_adam", ours.ScaledAdam, True),
}
"""With 2 000 matrices Keras' Adafactor traces and compiles for many minutes."""
