"""A module for each step; its number stands in its name."""
