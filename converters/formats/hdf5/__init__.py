"""HDF5 files: a walk over their groups and data sets, and their writing."""
