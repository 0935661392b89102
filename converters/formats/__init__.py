"""File formats: how bytes, records and arrays lie in a file, whoever keeps checkpoints in it.

These modules know neither containers nor optimizers. In goes an open file, or a tree of tensors and records. Out
comes such a tree, whose tensors are read when they are asked for; or the bytes of a file that the original programs
read.
"""
