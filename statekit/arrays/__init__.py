"""One array namespace, `xp`: a step is written once and runs in NumPy, JAX, PyTorch and TensorFlow.

A `Backend` has the operations that steps are made of, with every rounding written out, so that no result depends on how
a framework promotes or compiles. A framework is imported only when its name is asked for.
"""
