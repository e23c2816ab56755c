"""How workers that train copies of a model keep in agreement."""
