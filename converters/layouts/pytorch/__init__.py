"""The optimizers of torch.optim, and Hugging Face's Adafactor: by index, by name, flat."""
