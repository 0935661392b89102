"""Keras squares each part of an embedding's gradient by itself; ours for the variant keras do as Keras does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow

ROWS = [0, 2, 2, 2, 5]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Adam", {}),
        ("AdamW", {"weight_decay": 0.01}),
        ("Lamb", {}),
        ("Adafactor", {"clip_threshold": 0.1}),
    ],
)
def test_rows_that_are_met_several_times_move_as_in_keras(name: str, arguments: dict[str, Any]) -> None:
    import keras
    import tensorflow as tf

    import statekit.tensorflow as ours

    rng = np.random.default_rng(0)
    start = rng.normal(size=(6, 4)).astype(np.float32)
    other = {"Adam": "AdamW", "Lamb": "LAMB"}.get(name, name)
    made = {"weight_decay": None, **arguments} if name == "Adam" else arguments
    optimizers = [
        getattr(keras.optimizers, name)(learning_rate=0.1, **arguments),
        getattr(ours, other)(learning_rate=0.1, variant="keras", **_canonical(made)),
    ]
    params = [keras.Variable(start, name="table") for _ in optimizers]
    for optimizer, param in zip(optimizers, params, strict=True):
        optimizer.build([param])
    for _ in range(3):
        values = rng.normal(size=(5, 4)).astype(np.float32)
        for optimizer, param in zip(optimizers, params, strict=True):
            grad = tf.IndexedSlices(tf.constant(values), tf.constant(ROWS), tf.constant([6, 4]))
            optimizer.apply([grad], [param])
    theirs, mine = (np.asarray(param) for param in params)
    moved = np.abs(theirs - start).max()
    assert np.abs(mine - theirs).max() < 1e-5 * moved


def _canonical(arguments: dict[str, Any]) -> dict[str, Any]:
    names = {"weight_decay": "weight_decay_rate", "clip_threshold": "clipping_threshold"}
    return {names.get(name, name): value for name, value in arguments.items()}
