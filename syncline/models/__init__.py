"""Models: the zoo, declared models, and everything a model is built from by name."""
