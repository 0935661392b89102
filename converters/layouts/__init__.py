"""Layouts say what the names in a checkpoint mean for one optimizer implementation.

What goes in is an opened checkpoint: native names with their tensors, and what the user says beside it. What comes out
is the canonical state of the run, or, the other way, the tree of native names that a container writes; no layout opens
a file. Each registered layout is found by its own name: a folder, or a module with one `LAYOUT`, beside which stands
what a family shares.
"""
