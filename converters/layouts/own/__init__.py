"""The layouts of statekit's own: the canonical one, and the checkpoints of statekit.torch and statekit.jax.

Input: a tree whose slots go by their canonical names. Output: the state with nothing derived or assumed but what the
file leaves out; or the same tree again. That of statekit.tensorflow lies with Keras', whose files it shares.
"""
