"""The common part of the drop-in optimizers of PyTorch, JAX and TensorFlow.

It takes the options of a call, in canonical names or a variant's own, or a loaded state with the options that the user
overrides, and the names of a framework's parameters. It returns checked hyperparameters for each parameter, or one
error that names every fault in the same words in all three.
"""
