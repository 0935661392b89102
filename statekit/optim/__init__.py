"""The mathematics: the update of each optimizer, in a module of its own, written once over an array namespace.

In go parameters, slots, gradients, learning rates and what a variant of the optimizer has settled. Out come the next
parameters and slots. `run` takes a whole state through an update; nothing here knows of files or original names.
"""
