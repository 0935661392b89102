"""Whether a run is what it should be: the state in memory against its checkpoint, and files against themselves.

In go the canonical states of a checkpoint and of what is live in PyTorch, JAX or TensorFlow, or the checkpoints of a
run. Out come findings by name, each with where it is, what was expected, what is there and what to do.
"""
