"""Zarr arrays, versions 2 and 3, in folders and in OCDBT stores.

This package reads blocks of arrays, chunk by chunk, and writes arrays of version 2. Input: a store of keys and
values, with the name of an array; or a tensor. Output: a tensor that reads no more than it is asked for; or header
and chunks.
"""
