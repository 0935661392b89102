"""The files of `torch.save`: zip archives and the legacy form, read into records over storages, and written.

This package reads both forms and writes the newer one, without PyTorch. Input: an open file, or a tree. Output:
the object that was saved, as a tree of tensors and records; or a file that `torch.load(weights_only=True)` takes.
"""
