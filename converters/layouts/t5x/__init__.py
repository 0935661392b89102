"""The layout `t5x`: the train state of T5X's Adafactor, alone or several of them in a MultiOptimizer.

Input: a tree with `target` and `state/param_states`, and what gin or the user says of hyperparameters, which no
checkpoint of T5X stores. Output: an Adafactor state with a factor rule for every parameter; or T5X's tree again, with
placeholders for slots that aren't in use.
"""
