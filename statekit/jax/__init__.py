"""Optimizers that go on where T5X's, icefall's, MXNet's, Optax', PyTorch's and Keras' stopped, for Optax."""

from statekit.jax.from_checkpoint import load_optimizer, load_params
from statekit.jax.optimizers import adafactor, adamw, lamb, lans, scaled_adam
from statekit.jax.sharding import state_shardings
from statekit.jax.states import AdafactorState, AdamWState, LambState, LansState, ScaledAdamState

__all__ = [
    "AdafactorState",
    "AdamWState",
    "LambState",
    "LansState",
    "ScaledAdamState",
    "adafactor",
    "adamw",
    "lamb",
    "lans",
    "load_optimizer",
    "load_params",
    "scaled_adam",
    "state_shardings",
]
