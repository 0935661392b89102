"""MXNet's `.params` and `.states`."""
