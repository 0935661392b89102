"""Layout `torchao-8bit`: AdamW and Adam of torchao, moments in 8 bits."""

from __future__ import annotations

from statekit.converters.layouts.pytorch.low_bit import LowBit
from statekit.converters.layouts.pytorch.torchao_form import PRECISIONS, Torchao

LAYOUT = LowBit(
    "torchao-8bit",
    "AdamW and Adam of torchao, moments in 8 bits",
    Torchao(),
    "torchao.optim.AdamW8bit",
    PRECISIONS["torchao.optim.subclass_8bit.OptimState8bit"],
)
