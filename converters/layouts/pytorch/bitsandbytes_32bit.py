"""Layout `bitsandbytes-32bit`: AdamW of bitsandbytes, moments in float32, paged or not."""

from __future__ import annotations

from statekit.converters.layouts.pytorch.bitsandbytes_form import Bitsandbytes
from statekit.converters.layouts.pytorch.low_bit import LowBit

LAYOUT = LowBit(
    "bitsandbytes-32bit",
    "AdamW of bitsandbytes, moments in float32, paged or not",
    Bitsandbytes(),
    "bitsandbytes.optim.AdamW",
    None,
)
