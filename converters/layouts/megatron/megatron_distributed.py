"""Layout `megatron-distributed`: Adam of Megatron-Core's DistributedOptimizer (--use-distributed-optimizer).

Ranks share what is moved, a float32 copy `param` of each parameter, and its slots. The form is the one that any number
of ranks reads, with whole parameters: --dist-ckpt-optim-fully-reshardable.
Source: NVIDIA/Megatron-LM megatron/core/optimizer/distrib_optimizer.py, `sharded_param_state_fully_reshardable`;
megatron/training/checkpointing.py, `_build_sharded_state_dict_metadata`.
"""

from __future__ import annotations

from statekit.converters.layouts.megatron.layout import MegatronAdam

LAYOUT = MegatronAdam(
    "megatron-distributed",
    "Adam of Megatron-Core's DistributedOptimizer, fully reshardable",
    masters="param",
    sharding="fully_reshardable",
    flags=" --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
)
