"""Programs that `syncline bench` runs as processes of their own, by path."""
