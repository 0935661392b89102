"""T5X' Adafactor and MultiOptimizer."""
