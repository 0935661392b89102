"""TensorFlow 1's optimizers: Tensor2Tensor, Mesh-TensorFlow, Adam."""
