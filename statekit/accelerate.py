"""Two helpers for Accelerate.

statekit.accelerate.attest(accelerator, "run/checkpoint") proves after `load_state` that a resumed run is its
checkpoint's. statekit.accelerate.SealsEachSave().begin("run/checkpoint"), in the main process after `save_state`, seals
a save and lets doctor examine it.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

from statekit.attestation.attestation import Attestation
from statekit.attestation.each_save import SealsEachSave
from statekit.torch.attestation import attest as attest_torch
from statekit.torch.attestation import only

__all__ = ["SealsEachSave", "attest"]


def attest(
    accelerator: Any, path: str | PathLike[str], *, strict: bool = True, **options: Any
) -> Attestation:
    """Compares what an `Accelerator` has prepared with the checkpoint that it goes on from.

    Call it after `load_state`, and after whatever else changes the run before its first update.

    Args:
        accelerator: It has prepared a model, optimizers, and schedulers if there are some.
        path: The folder that `save_state` wrote, or anything else that statekit reads.
        strict: Whether to raise what is wrong.
        **options: Those of `statekit.torch.attest`.

    Raises:
        StateError: With `strict`, the live run isn't the checkpoint's; or the checkpoint can't be decoded.
        UsageError: Its optimizers move several models, or none.
    """
    return attest_torch(
        accelerator._optimizers,
        only(_moved(accelerator), "model"),
        path,
        scheduler=accelerator._schedulers,
        scaler=accelerator.scaler,
        strict=strict,
        **options,
    )


def _moved(accelerator: Any) -> list[Any]:
    """Returns the models whose parameters its optimizers move: others may be prepared beside them, frozen."""
    groups = [group for optimizer in accelerator._optimizers for group in optimizer.param_groups]
    params = {id(param) for group in groups for param in group["params"]}
    models = list(accelerator._models)
    moved = [model for model in models if any(id(param) in params for param in model.parameters())]
    return moved or models  # DeepSpeed's optimizer has flat parameters of its own
