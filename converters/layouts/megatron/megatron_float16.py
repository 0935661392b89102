"""Layout `megatron-float16`: Adam of Megatron-Core's Float16OptimizerWithFloat16Params, for runs with --bf16 or --fp16.

What it moves is a float32 master of each parameter, `fp32_param`; the parameter is its rounding.
Source: NVIDIA/Megatron-LM megatron/core/optimizer/optimizer.py, `Float16OptimizerWithFloat16Params`.
"""

from __future__ import annotations

from statekit.converters.layouts.megatron.layout import MegatronAdam

LAYOUT = MegatronAdam(
    "megatron-float16",
    "Adam of Megatron-Core for --bf16 and --fp16 runs",
    masters="fp32_param",
    flags=" --bf16",
)
