"""The files of torch.distributed.checkpoint: `.metadata` and the shards of its tensors."""
