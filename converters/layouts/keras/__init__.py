"""The layouts of Keras 3's optimizers, and of statekit.tensorflow's, in Keras' own files and in object graphs.

Input: a model's tree with numbered variables, and its config if the file has one. Output: the canonical state, each
of the optimizer's variables matched to a parameter; or the tree again, in the places where they lay or by the
parameters' paths. `state` is about the optimizer's variables, `variables` about the model's, whatever the file.
"""
