"""What the drop-in optimizers of PyTorch, JAX and TensorFlow share: what may be said to them, and what state is whose.

In go the options of a call, in canonical names or a variant's own, or a loaded state with the options that the user
overrides, and the names of a framework's parameters. Out come checked hyperparameters for each parameter, or one
error that names every fault, in the same words in all three.
"""
