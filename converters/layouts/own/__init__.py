"""The optimizers of statekit.torch and statekit.jax."""
