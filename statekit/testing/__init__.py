"""Conformance suites: whoever writes a container, layout or step inherits its tests."""
