"""Layouts: the meaning of the names in a checkpoint for one optimizer implementation.

Input: an opened checkpoint, and the user's hints. Output: the canonical state of the run. The other way, a layout
encodes a state to the tree of native names that a container writes. No layout opens a file. Each registered layout has
its own name here: a folder, or a module with one `LAYOUT`, beside the modules that a family shares.
"""
