"""Weights alone: what a checkpoint means in which nothing but a model's parameters was saved.

One layout for each family of files, since each keeps a model under names of its own. They fit only where no optimizer
lies beside the weights; their states have no optimizer, and no other layout writes them: nothing is made up.
"""
