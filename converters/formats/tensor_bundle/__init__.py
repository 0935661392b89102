"""TensorFlow's tensor bundles: the table of entries, what an entry says, the object graph, and their writing."""
