"""Terminal views of a run."""
