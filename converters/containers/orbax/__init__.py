"""Orbax' folders: items, their metadata, arrays with and without OCDBT."""
