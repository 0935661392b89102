"""DeepSpeed's folders: ZeRO's partitions and universal checkpoints.

This package puts together what the ranks of a run wrote. Input: a step's folder, a run's, or a universal copy. Output:
the tree of other PyTorch checkpoints: the model, the optimizer by parameter, and what the engine keeps. Such a
tree is written as a universal checkpoint, which any number of ranks loads.
"""
