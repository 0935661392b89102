"""File formats: how bytes, records and arrays lie in a file, whoever keeps checkpoints in it."""
