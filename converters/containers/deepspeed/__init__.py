"""DeepSpeed's folders: ZeRO's partitions and universal checkpoints."""
