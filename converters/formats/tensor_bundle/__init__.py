"""TensorFlow's tensor bundles: the table of entries, the shards, the object graph."""
