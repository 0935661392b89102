"""The mathematics: the update of each optimizer, in a module of its own, written once over an array namespace.

An update takes parameters, slots, gradients, learning rates and the settled hyperparameters of a variant. It returns
the next parameters and slots. `run` takes a whole state through an update. Nothing here knows files or original names.
"""
