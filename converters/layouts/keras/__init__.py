"""Keras' optimizers, and ours in Keras: in its own files and in object graphs."""
