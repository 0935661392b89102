"""Layouts: one module for each way that an optimizer implementation names its slots."""
