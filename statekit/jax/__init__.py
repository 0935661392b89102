"""JAX: the originals' optimizers as optax.GradientTransformations, and resuming from any checkpoint statekit reads.

`load_optimizer` takes a tree of parameters and a checkpoint of any system that holds them. It returns a transformation
and a state that continue where T5X, icefall, MXNet, Optax, PyTorch or Keras stopped.
"""

from statekit.errors import MissingExtraError, extra

try:
    from statekit.attestation.each_save import SealsEachSave
    from statekit.jax.attestation import attest
    from statekit.jax.from_checkpoint import load_optimizer, load_params
    from statekit.jax.optimizers import adafactor, adamw, lamb, lans, muon, scaled_adam
    from statekit.jax.sharding import state_shardings
    from statekit.jax.states import (
        AdafactorState,
        AdamWState,
        LambState,
        LansState,
        MuonState,
        ScaledAdamState,
    )
    from statekit.jax.step_attestation import attested_step
except ModuleNotFoundError as error:
    if error.name in ("jax", "optax"):
        raise MissingExtraError("JAX isn't installed.", found=error, remedy=extra("jax")) from error
    raise

__all__ = [
    "AdafactorState", "AdamWState", "LambState", "LansState", "MuonState", "ScaledAdamState", "SealsEachSave",
    "adafactor", "adamw", "attest", "attested_step", "lamb", "lans", "load_optimizer", "load_params", "muon",
    "scaled_adam", "state_shardings",
]  # fmt: skip
