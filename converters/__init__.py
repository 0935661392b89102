"""Converters: how each system stores bytes (formats, containers) and names slots (layouts).

Input: a path, or a tree that a container shall write. Output: a checkpoint with native names, or files that the
system's own reader takes; a layout turns the names into the canonical state and back.
"""
