"""Files: opened without trust, written without accidents, described by a manifest."""
