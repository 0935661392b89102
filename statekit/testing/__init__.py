"""Conformance suites: whoever writes a container, layout or step inherits its tests.

In goes your container, layout or step, with a sample of what it reads. Out come assertions that every one of its kind
fulfils: it is distinguished from all others, opened without its values and written again bit for bit, damage is a
typed error, a step keeps to its schema.
"""
