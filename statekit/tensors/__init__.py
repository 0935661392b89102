"""Tensors that are described before they are read, and their views, trees, digests and statistics.

In goes what a file's header says of an array, and a function that reads a block of it. Out comes a value with a shape
and a dtype that can be sliced, joined, renamed, digested or streamed block by block, however large it is.
"""
