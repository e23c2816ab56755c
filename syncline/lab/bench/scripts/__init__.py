"""Programs that `syncline bench` starts as separate processes, by path."""
