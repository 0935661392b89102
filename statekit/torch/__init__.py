"""PyTorch: the originals' optimizers as ordinary ones, and resuming from any checkpoint statekit reads.

`load_optimizer` takes named parameters and a checkpoint of any system that holds them. It returns a
`torch.optim.Optimizer` that continues where the original stopped:

import statekit.torch

statekit.torch.load_params("checkpoint_1000000", model)
optimizer = statekit.torch.load_optimizer("checkpoint_1000000", model.named_parameters(), lr=1e-3)
"""

import sys

from statekit.errors import MissingExtraError, extra

try:
    from statekit.torch import optimizers
    from statekit.torch.attestation import attest
    from statekit.torch.from_checkpoint import load_optimizer, load_params
    from statekit.torch.optimizers import LAMB, LANS, Adafactor, AdamW, Muon, ScaledAdam
    from statekit.torch.partition import Partition
    from statekit.torch.step_attestation import attested_step
except ModuleNotFoundError as error:
    if error.name == "torch":
        raise MissingExtraError("PyTorch isn't installed.", found=error, remedy=extra("torch")) from error
    raise

for _module in ("adafactor", "adamw", "lamb", "lans", "scaled_adam"):
    # A pickled optimizer names its class by the module that held it in 0.2.0.
    sys.modules[f"{__name__}.{_module}"] = optimizers

__all__ = [
    "LAMB", "LANS", "Adafactor", "AdamW", "Muon", "Partition", "ScaledAdam", "attest", "attested_step",
    "load_optimizer", "load_params",
]  # fmt: skip
