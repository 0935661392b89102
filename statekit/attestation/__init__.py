"""Attestation: is the state in memory that of its checkpoint, and do the files agree with themselves?

It compares the canonical state of a checkpoint with the live state in PyTorch, JAX or TensorFlow, or the checkpoints of
one run with each other. It returns findings by name, each with place, expected, found and remedy.
"""
