"""A model as a chain of units that can be cut into pipeline stages."""
