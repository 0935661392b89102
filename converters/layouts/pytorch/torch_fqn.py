"""Layouts `torch-fqn` and `torch-fqn-flat`: the optimizers of `torch-optim` as torch.distributed gathers them, by name.

FQN is PyTorch's word for a parameter's fully qualified name. In the flat form every option stands by parameter.

Source: pytorch/pytorch torch/distributed/checkpoint/state_dict.py, `get_state_dict`, `_flatten_optim_state_dict`.
"""

from __future__ import annotations

from statekit.converters.layouts.pytorch.torch_optim import TorchOptim

BY_NAME = TorchOptim(
    "torch-fqn",
    "the same as torch-optim, by name as get_state_dict gathers it",
    containers=("torch", "dcp"),
    form="name",
)
FLAT = TorchOptim(
    "torch-fqn-flat",
    "the same flat, an entry for each option of a parameter",
    containers=("torch", "dcp", "dcp-safetensors"),
    form="flat",
)
