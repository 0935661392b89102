"""Tensors that are described before they are read: shapes, views, trees of inert records, digests, statistics."""
