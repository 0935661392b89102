"""The canonical state of a training run, held to published schemas.

In go parameters, slots, groups with hyperparameters, counts and factor rules under canonical names, whatever system
they come from. Out comes a `TrainState` in which everything fits the optimizer's schema, or an error that lists every
fault.
"""
