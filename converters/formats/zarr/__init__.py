"""Zarr arrays, versions 2 and 3, in folders and in OCDBT stores."""
