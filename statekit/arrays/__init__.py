"""One array namespace, `xp`, in which a step is written once and runs in NumPy, JAX, PyTorch and TensorFlow."""
