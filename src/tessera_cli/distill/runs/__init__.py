"""A run on disk: its directory, its state, its models."""
