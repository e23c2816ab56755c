"""Graphs and vertex programs. `syncline/graph.py` has what users call."""
