"""The canonical state of a training run, checked by published schemas.

A `TrainState` has parameters, slots, groups with hyperparameters, counts and factor rules under canonical names,
whatever system they come from. All of it fits the optimizer's schema; otherwise an error lists every fault.
"""
