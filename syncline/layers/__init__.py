"""Layers that torch.nn has no module for: joins of branches, changes of shape, and noise."""
