"""Containers: the form of a checkpoint's files, one module or folder for each registered name.

A container opens a path as a `Checkpoint`, a tree whose tensors are read on demand. It writes a tree that a layout
encoded, through a stage. It knows names, shapes, dtypes and bytes, and nothing of optimizers.
"""
