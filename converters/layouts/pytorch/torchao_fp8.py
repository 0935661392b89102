"""Layout `torchao-fp8`: AdamW and Adam of torchao, moments in float8."""

from __future__ import annotations

from statekit.converters.layouts.pytorch.low_bit import LowBit
from statekit.converters.layouts.pytorch.torchao_form import PRECISIONS, Torchao

LAYOUT = LowBit(
    "torchao-fp8",
    "AdamW and Adam of torchao, moments in float8",
    Torchao(),
    "torchao.optim.AdamWFp8",
    PRECISIONS["torchao.optim.subclass_fp8.OptimStateFp8"],
)
