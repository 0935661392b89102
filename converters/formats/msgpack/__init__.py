"""Flax's msgpack: an index of its arrays, made without reading them, and its writing.

This package reads and writes what `flax.serialization` does, without Flax. Input: an open file, or a tree. Output:
a tree that knows where each array's bytes lie; or the bytes of a file, block by block.
"""
