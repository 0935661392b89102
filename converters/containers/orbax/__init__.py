"""Orbax' folders: items, their metadata, arrays with and without OCDBT.

This package reads every form that Orbax has written, and writes today's. In goes a run's folder, a step's, or an
item's. Out comes the item's tree, or a tree of items where a step has several.
"""
