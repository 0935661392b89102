"""The layouts of TensorFlow 1's optimizers: Tensor2Tensor's and Mesh-TensorFlow's Adafactor, and their Adams.

Input: a flat tree of variables, with slots beside them by name, or the same in an object graph. Output: the
canonical state of one optimizer; or the variables and slots again, under the names of the target's graph. Each
optimizer's module holds its names.
"""
