"""Orbax' folders: items, their metadata, arrays with and without OCDBT.

This package reads every form that Orbax has written, and writes today's. Input: a run's folder, a step's, or an
item's. Output: the item's tree, or a tree of items where a step has several.
"""
