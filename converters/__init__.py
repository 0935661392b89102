"""Converters: how each system stores bytes (containers) and names slots (layouts)."""
