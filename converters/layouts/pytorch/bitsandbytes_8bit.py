"""Layout `bitsandbytes-8bit`: AdamW of bitsandbytes, moments in 8 bits."""

from __future__ import annotations

from statekit.converters.layouts.pytorch.bitsandbytes_form import PRECISION, Bitsandbytes
from statekit.converters.layouts.pytorch.low_bit import LowBit

LAYOUT = LowBit(
    "bitsandbytes-8bit",
    "AdamW of bitsandbytes, moments in 8 bits",
    Bitsandbytes(),
    "bitsandbytes.optim.AdamW8bit",
    PRECISION,
)
