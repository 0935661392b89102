"""Layout `mesh-tf`: Mesh-TensorFlow's Adafactor, with slots by name: `w_slot_vr`, `w_slot_vc`, `w_slot_v`, `w_slot_m`.

Source: tensorflow/mesh, mesh_tensorflow/optimize.py, `AdafactorOptimizer.apply_grad`.
"""

from __future__ import annotations

import re

from statekit.converters.layouts.tensorflow.layout import TensorFlow1
from statekit.state.schema import load_schema

_MADE = ("m", "v_row", "v_col", "v")
_NATIVE = {slot: load_schema("adafactor").slots[slot].aliases["mesh_tf"] for slot in _MADE}

LAYOUT = TensorFlow1(
    name="mesh-tf",
    title="Mesh-TensorFlow's Adafactor",
    schema="adafactor",
    makers=("mesh_tf",),
    pattern=re.compile(rf"(?P<base>.+)_slot_(?P<slot>{'|'.join(_NATIVE.values())})", re.DOTALL),
    suffix="_slot_",
    native=_NATIVE,
    after_restoring=("session.run(lowering.copy_masters_to_slices())  # as MtfRestoreHook does",),
)
