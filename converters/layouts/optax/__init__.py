"""The layout `optax`: the states of Optax' Adafactor, AdamW and LAMB, wherever in a chain of transformations they hang.

Input: a tree without class names, in which a link is known by its fields alone. Output: the state of the one
optimizer in it, with the form of the whole tree kept beside; or the tree in that form again, or in the form that Optax'
own functions make. The layout `statekit-jax` shares the links and the forms.
"""
