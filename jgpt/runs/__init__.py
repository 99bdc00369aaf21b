"""A run on disk: its directory, checkpoints, metrics and provenance."""
