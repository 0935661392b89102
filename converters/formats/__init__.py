"""File formats: the form of bytes, records and arrays in a file, whichever program keeps checkpoints in it.

A format reads an open file into a tree of tensors and records, whose tensors are read on demand. It writes such a tree
as the bytes that the original programs read. These modules know neither containers nor optimizers.
"""
