"""Steps in a run's folder: which there are, what lies beside them, what a new one is called."""
