"""The mathematics: one module per optimizer, written once over an array namespace."""
