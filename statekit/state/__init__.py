"""The canonical state of a training run: parameters, slots, groups and hyperparameters, held to published schemas."""
