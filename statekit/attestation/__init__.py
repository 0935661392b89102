"""Whether a live run is the run of its checkpoint: the state in memory, held against the files before an update.

In go the canonical states of a checkpoint and of what is live in PyTorch, JAX or TensorFlow. Out comes an
`Attestation`: a verdict, and every finding by name, with what was expected, what is there and what to do.
"""
