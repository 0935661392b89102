"""Containers: how arrays and records lie in files, one module or folder for each registered name.

A container knows names, shapes, dtypes and bytes, and nothing of optimizers. In goes a path; out comes a `Checkpoint`,
a tree whose tensors are read when asked for. The other way in goes a tree as a layout encoded it, and out come files,
written through a stage.
"""
