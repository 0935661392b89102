"""Verbs about stores."""
