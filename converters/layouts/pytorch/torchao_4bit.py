"""Layout `torchao-4bit`: AdamW and Adam of torchao, moments in 4 bits."""

from __future__ import annotations

from statekit.converters.layouts.pytorch.low_bit import LowBit
from statekit.converters.layouts.pytorch.torchao_form import PRECISIONS, Torchao

LAYOUT = LowBit(
    "torchao-4bit",
    "AdamW and Adam of torchao, moments in 4 bits",
    Torchao(),
    "torchao.optim.AdamW4bit",
    PRECISIONS["torchao.optim.subclass_4bit.OptimState4bit"],
)
