"""Conversion: the contracts of containers and layouts, the plan from one system to another, and its execution.

A plan is made of a checkpoint, a target and the user's hints. It gives the exactness of every tensor before a value is
read. Its execution returns a report of what was written and proven. Only `registry` knows the converters, by their
entry points; `contracts` stands below them, all other modules above.
"""
