"""PyTorch: the originals' optimizers as ordinary ones, and resuming from any checkpoint statekit reads.

In go named parameters, or those with a checkpoint of any system that holds them. Out comes a `torch.optim.Optimizer`
that goes on where the original stopped:

import statekit.torch

statekit.torch.load_params("checkpoint_1000000", model)
optimizer = statekit.torch.load_optimizer("checkpoint_1000000", model.named_parameters(), lr=1e-3)
"""

from statekit.errors import MissingExtraError

try:
    from statekit.torch.adafactor import Adafactor
    from statekit.torch.adamw import AdamW
    from statekit.torch.attestation import attest
    from statekit.torch.from_checkpoint import load_optimizer, load_params
    from statekit.torch.lamb import LAMB
    from statekit.torch.lans import LANS
    from statekit.torch.partition import Partition
    from statekit.torch.scaled_adam import ScaledAdam
    from statekit.torch.step_attestation import attested_step
except ModuleNotFoundError as error:
    if error.name == "torch":
        raise MissingExtraError(
            "PyTorch isn't installed.", found=error, remedy="pip install 'statekit[torch]'"
        ) from error
    raise

__all__ = [
    "LAMB",
    "LANS",
    "Adafactor",
    "AdamW",
    "Partition",
    "ScaledAdam",
    "attest",
    "attested_step",
    "load_optimizer",
    "load_params",
]
