"""Starting, watching and ending worker processes. An engine knows nothing about training."""
