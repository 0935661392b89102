"""Layout `tf-adam`: TensorFlow 1's Adam, `w/Adam` and `w/Adam_1`, with powers of its betas for a count.

Source: tensorflow/tensorflow v1.15, python/training/adam.py, `AdamOptimizer._create_slots`.
"""

from __future__ import annotations

import re

from statekit.converters.layouts.tensorflow.layout import TensorFlow1

LAYOUT = TensorFlow1(
    name="tf-adam",
    title="TensorFlow 1's Adam",
    schema="adamw",
    makers=("tf1",),
    pattern=re.compile(r"(?P<base>.+)/(?:Lazy)?Adam(?P<slot>(?:_1)?)", re.DOTALL),
    suffix="/Adam",
    native={"m": "", "v": ""},
    powers=True,
)
