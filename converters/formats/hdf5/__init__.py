"""HDF5 files: a walk over their groups and data sets, and their writing.

This package reads and writes a file as a tree, with h5py, of which nothing is asked that a hostile file could misuse.
Input: an open file, or a tree. Output: a tree of groups, data sets as tensors and attributes as plain values; or a
file.
"""
