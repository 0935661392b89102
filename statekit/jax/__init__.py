"""Optimizers that go on where T5X's, icefall's, MXNet's, Optax', PyTorch's and Keras' stopped, for Optax."""

from statekit.jax.states import AdafactorState, AdamWState, LambState, LansState, ScaledAdamState

__all__ = ["AdafactorState", "AdamWState", "LambState", "LansState", "ScaledAdamState"]
