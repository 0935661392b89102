"""The state of each optimizer, as JSON with sources: slots, hyperparameters, variants and their differences.

Each fact was read in the originals or measured on them. Layouts, steps and drop-ins ask a schema and repeat none of it.
"""
