"""The files of torch.distributed.checkpoint: `.metadata` and the shards of its tensors.

This package reads what any number of ranks wrote, and writes as one process does. Input: the metadata and the folder
of the shards, or a tree. Output: tensors, joined from their pieces, and other objects, by flat key; or metadata and
one shard.
"""
