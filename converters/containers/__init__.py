"""Containers: one module for each way that arrays and records lie in files."""
