"""File formats: the form of bytes, records and arrays in a file, whichever program keeps checkpoints in it.

These modules know neither containers nor optimizers. Input: an open file, or a tree of tensors and records. Output:
such a tree, whose tensors are read on demand; or the bytes of a file that the original programs read.
"""
