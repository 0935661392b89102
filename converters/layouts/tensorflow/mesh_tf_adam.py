"""Layout `mesh-tf-adam`: Mesh-TensorFlow's and GPT-Neo's AdamWeightDecay, `w/adam_m` and `w/adam_v`.

Source: tensorflow/mesh, mesh_tensorflow/optimize.py, `AdamWeightDecayOptimizer.apply_grad`.
"""

from __future__ import annotations

import re

from statekit.converters.layouts.tensorflow.layout import TensorFlow1

LAYOUT = TensorFlow1(
    name="mesh-tf-adam",
    title="Mesh-TensorFlow's and GPT-Neo's AdamWeightDecay",
    schema="adamw",
    makers=("mesh_tf", "gpt_neo"),
    pattern=re.compile(r"(?P<base>.+)/adam_(?P<slot>m|v)", re.DOTALL),
    suffix="/adam_",
    native={"m": "m", "v": "v"},
    after_restoring=("session.run(lowering.copy_masters_to_slices())  # as MtfRestoreHook does",),
)
