"""Flax's msgpack: an index of its arrays, made without reading them, and its writing."""
