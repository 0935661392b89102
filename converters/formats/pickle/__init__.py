"""Pickles, read into inert records without executing anything, and written again."""
