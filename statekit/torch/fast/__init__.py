"""Fast paths in PyTorch: the same rules on stacks of equal parameters, held to the text of statekit.optim by tests."""
