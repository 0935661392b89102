"""Tensors that are described before they are read, and their views, trees, digests and statistics.

A tensor is made of a file's header and a function that reads a block. It has a shape and a dtype; it can be sliced,
joined, renamed, digested and streamed block by block, however large it is.
"""
