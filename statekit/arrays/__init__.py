"""One array namespace, `xp`, in which a step is written once and runs in NumPy, JAX, PyTorch and TensorFlow.

In goes the name of a framework, which is imported only then. Out comes a `Backend`: the operations that steps are made
of, with every rounding written out, so that nothing depends on how a framework promotes or compiles.
"""
