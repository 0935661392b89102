"""Layout `t2t`: Tensor2Tensor's Adafactor, whose slots are numbered: `w/Adafactor`, `w/Adafactor_1`, `w/Adafactor_2`.

Source: tensorflow/tensor2tensor, utils/adafactor.py, `AdafactorOptimizer._create_slots`.
"""

from __future__ import annotations

import re

from statekit.converters.layouts.tensorflow.layout import TensorFlow1

LAYOUT = TensorFlow1(
    name="t2t",
    title="Tensor2Tensor's Adafactor",
    schema="adafactor",
    makers=("t2t_late", "t2t_early"),
    pattern=re.compile(r"(?P<base>.+)/Adafactor(?P<slot>(?:_\d+)?)", re.DOTALL),
    suffix="/Adafactor",
    native={"m": "", "v_row": "", "v_col": "", "v": ""},
    trainer="t2t-trainer --output_dir={folder}",
)
