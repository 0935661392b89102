"""Weights alone: what a checkpoint means in which nothing but a model's parameters was saved.

There is one layout for each family of files, since each keeps a model under names of its own. Input: a tree that has
no optimizer beside the weights. Output: a state without an optimizer, which no other layout writes: nothing is made
up.
"""
