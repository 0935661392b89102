"""Pickles, read into inert records without executing anything, and written again.

This package is a stack machine that imports and calls nothing, and its inverse. Input: a pickle's bytes, and the
names of calls that have a plain meaning; or a tree. Output: a tree of plain values and records; or the same bytes
again.
"""
