"""Replay, error bounds and verdicts: the proof that updates are equivalent."""
