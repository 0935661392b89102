"""The layouts of Megatron-Core's Adam, one for each of its optimizers that keeps groups, masters and count otherwise.

Input: the keys of what is cut, and common.pt with groups that don't say what they move. Output: the canonical state,
groups by Megatron-Core's rule; or keys and common.pt again, with what the target's optimizer and its trainer look for.
"""
