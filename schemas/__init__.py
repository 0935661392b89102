"""Canonical optimizer schemas, as JSON with sources."""
