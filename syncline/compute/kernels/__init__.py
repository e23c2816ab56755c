"""Compiled code for what torch computes slowly on some processors: optional, and built on first use."""
