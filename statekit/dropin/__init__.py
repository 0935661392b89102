"""What the drop-in optimizers of PyTorch, JAX and TensorFlow share."""
