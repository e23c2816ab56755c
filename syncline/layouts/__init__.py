"""Layouts: how one replica of a model is spread over workers. One file each; a strategy works between replicas."""
