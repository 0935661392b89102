"""Layout `bitsandbytes-32bit`: AdamW and others of bitsandbytes, moments in float32, paged or not."""

from __future__ import annotations

from statekit.converters.layouts.pytorch import native
from statekit.converters.layouts.pytorch.bitsandbytes_form import NATIVE_SLOTS, Bitsandbytes
from statekit.converters.layouts.pytorch.low_bit import LowBit

LAYOUT = LowBit(
    "bitsandbytes-32bit",
    "AdamW and others of bitsandbytes, moments in float32, paged or not",
    Bitsandbytes(),
    "bitsandbytes.optim.AdamW",
    None,
    variants={"adamw": ("torch",), native.SCHEMA: ()},
    native_slots=NATIVE_SLOTS,
)
