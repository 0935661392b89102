"""Layout `torch-fqn`: the optimizers of `torch-optim` by name, as torch.distributed gathers them.

FQN is PyTorch's word for a parameter's fully qualified name.

Source: pytorch/pytorch torch/distributed/checkpoint/state_dict.py, `get_state_dict`.
"""

from __future__ import annotations

from statekit.converters.layouts.pytorch.torch_optim import TorchOptim

LAYOUT = TorchOptim(
    "torch-fqn",
    "the same as torch-optim, by name as get_state_dict gathers it",
    containers=("dcp", "torch"),
    form="name",
    holds_several=("torch", "dcp"),
)
