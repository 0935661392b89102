"""Layout `bitsandbytes-8bit`: AdamW and others of bitsandbytes, moments in 8 bits."""

from __future__ import annotations

from statekit.converters.layouts.pytorch import native
from statekit.converters.layouts.pytorch.bitsandbytes_form import NATIVE_SLOTS, PRECISION, Bitsandbytes
from statekit.converters.layouts.pytorch.low_bit import LowBit

LAYOUT = LowBit(
    "bitsandbytes-8bit",
    "AdamW and others of bitsandbytes, moments in 8 bits",
    Bitsandbytes(),
    "bitsandbytes.optim.AdamW8bit",
    PRECISION,
    variants={"adamw": ("torch",), native.SCHEMA: ()},
    native_slots=NATIVE_SLOTS,
)
