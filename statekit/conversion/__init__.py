"""Conversion: the contracts of containers and layouts, the plan from one system to another, and its execution.

In goes a checkpoint, where it shall go, and what the user says beside. Out comes a plan, which knows of every tensor
how exact it will be before a value is read; and, once it is carried out, a report of what was written and proven.
Only `registry` knows the converters, by their entry points; `contracts` stands below them, all else above.
"""
