"""MXNet's files: `.params` and `.states` side by side."""
