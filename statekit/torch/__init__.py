"""PyTorch: T5X's Adafactor as an ordinary optimizer, and resuming from any checkpoint statekit reads.

import statekit.torch

statekit.torch.load_params("checkpoint_1000000", model)
optimizer = statekit.torch.load_optimizer("checkpoint_1000000", model.named_parameters(), lr=1e-3)
"""

from statekit.torch.adafactor import Adafactor
from statekit.torch.resume import load_optimizer, load_params

__all__ = ["Adafactor", "load_optimizer", "load_params"]
