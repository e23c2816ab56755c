"""Samples: where they come from, in which order they are used, and how they reach a worker in time."""
