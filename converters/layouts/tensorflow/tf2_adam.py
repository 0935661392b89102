"""Layout `tf2-adam`: TensorFlow 1's Adam in `tf.train.Checkpoint`."""

from __future__ import annotations

from statekit.converters.layouts.tensorflow import tf_adam
from statekit.converters.layouts.tensorflow.graph_layout import TF1Graph

LAYOUT = TF1Graph(inner=tf_adam.LAYOUT, name="tf2-adam", slots={"m": "m", "v": "v"})
