"""statekit moves the optimizer state of a training run between frameworks."""
