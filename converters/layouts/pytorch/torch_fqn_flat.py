"""Layout `torch-fqn-flat`: the optimizers of `torch-optim` flat, where every option stands by parameter.

Source: pytorch/pytorch torch/distributed/checkpoint/state_dict.py, `_flatten_optim_state_dict`.
"""

from __future__ import annotations

from statekit.converters.layouts.pytorch.torch_optim import TorchOptim

LAYOUT = TorchOptim(
    "torch-fqn-flat",
    "the same flat, an entry for each option of a parameter",
    containers=("dcp", "torch", "dcp-safetensors"),
    form="flat",
    holds_several=("torch", "dcp"),
)
