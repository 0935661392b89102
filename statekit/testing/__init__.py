"""Conformance suites: the author of a container, layout or step inherits its tests.

A suite takes your container, layout or step with a sample of its files. It asserts the laws of its kind: no other
container claims the sample, it opens without reading values, it is written again bit for bit, damage is a typed error,
and a step keeps to its schema.
"""
