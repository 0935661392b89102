"""Layout `tf2-t2t`: Tensor2Tensor's Adafactor in `tf.train.Checkpoint`, whose object graph names its slots."""

from __future__ import annotations

from statekit.converters.layouts.tensorflow import t2t
from statekit.converters.layouts.tensorflow.graph_layout import TF1Graph
from statekit.state.schema import load_schema

_SLOTS = load_schema("adafactor").slots
LAYOUT = TF1Graph(
    inner=t2t.LAYOUT,
    name="tf2-t2t",
    slots={name: slot.aliases["t2t_late"] for name, slot in _SLOTS.items() if "t2t_late" in slot.aliases},
)
