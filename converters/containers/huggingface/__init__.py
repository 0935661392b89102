"""Folders of Hugging Face's libraries: Trainer's, Accelerate's, and a model in safetensors.

This package reads and writes what these libraries load, one module for each. Input: a folder, or a single
safetensors file. Output: a tree with the model, the optimizer and every other file, which PyTorch's layouts read.
"""
