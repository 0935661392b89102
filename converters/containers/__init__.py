"""Containers: the form of a checkpoint's files, one module or folder for each registered name.

A container knows names, shapes, dtypes and bytes, and nothing of optimizers. Input: a path. Output: a `Checkpoint`, a
tree whose tensors are read on demand. It also writes a tree that a layout encoded, through a stage.
"""
