"""DeepSpeed's folders: ZeRO's partitions and universal checkpoints.

This package puts together what the ranks of a run wrote, and only reads. In goes a step's folder, a run's, or a
universal copy. Out comes the tree of other PyTorch checkpoints: the model, the optimizer by parameter, and what the
engine keeps.
"""
