"""Fuzzers of every reader of ours: valid samples, changed in their structure or their bytes."""
