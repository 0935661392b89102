"""What each optimizer keeps, as JSON with sources: slots, hyperparameters, variants and how they differ.

In goes what was read in the originals and measured on them. Out comes what every layout, step and drop-in asks instead
of telling it again.
"""
