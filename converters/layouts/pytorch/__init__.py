"""The layouts of PyTorch's and Hugging Face's optimizers: `torch-optim` by index, `torch-fqn` by name, or flat.

Input: a tree with a model's state and an optimizer's, wherever in a file they lie. Output: the canonical state, each
index matched to a parameter by names or by shapes; or the same parts again, in the places where they lay. What every
layout of a torch file needs to know about these parts is in `parts` and `param_order`.
"""
