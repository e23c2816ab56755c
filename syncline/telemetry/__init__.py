"""What happened, as events: the only bridge from a run to whatever shows, reports or compares it."""
