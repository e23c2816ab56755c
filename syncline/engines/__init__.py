"""Starting, watching and stopping processes. An engine knows nothing of training."""
