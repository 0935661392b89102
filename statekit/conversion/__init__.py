"""Conversion: the contracts of containers and layouts, the plan from one to the other, and its execution."""
