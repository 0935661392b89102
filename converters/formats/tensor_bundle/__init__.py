"""TensorFlow's tensor bundles: the table of entries, what an entry says, the object graph, and their writing.

This package reads and writes these parts, without TensorFlow. Input: the bytes of an index, or a flat tree of tensors
by name. Output: entries, each with its place in the data files, and the graph; or an index and one data file.
"""
