"""Layout `mesh-tf`: Mesh-TensorFlow's Adafactor, with slots by name: `w_slot_vr`, `w_slot_vc`, `w_slot_v`, `w_slot_m`.

Source: tensorflow/mesh, mesh_tensorflow/optimize.py, `AdafactorOptimizer.apply_grad`.
"""

from __future__ import annotations

import re

from statekit.converters.layouts.tensorflow1.layout import TensorFlow1

LAYOUT = TensorFlow1(
    name="mesh-tf",
    title="Mesh-TensorFlow's Adafactor",
    schema="adafactor",
    makers=("mesh_tf",),
    pattern=re.compile(r"(?P<base>.+)_slot_(?P<slot>vr|vc|v|m)", re.DOTALL),
    suffix="_slot_",
    native={"m": "m", "v_row": "vr", "v_col": "vc", "v": "v"},
)
