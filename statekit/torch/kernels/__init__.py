"""Kernels for a GPU, generated from the text of the rules: one launch for many tensors and each pass over memory."""
