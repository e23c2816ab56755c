"""A run's state on disk: complete or absent, checked when read, and safe to load."""
