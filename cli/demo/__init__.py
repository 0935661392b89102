"""`statekit demo`: a T5 that T5X trained goes on in PyTorch, and small checkpoints to try the other verbs on.

Input: a recording of T5X. Output: its checkpoint in PyTorch, the updates after it, and how far they are from its own.
"""
