"""The layouts of TensorFlow 1's optimizers: Tensor2Tensor's and Mesh-TensorFlow's Adafactor, and their Adams.

In goes a flat tree of variables, with slots beside them by name, or the same in an object graph. Out comes the
canonical state of one optimizer; or the variables and slots again, under the names that the target's graph gives them. Each
optimizer's module holds its names.
"""
