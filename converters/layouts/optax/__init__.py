"""Optax' chains of transformations."""
