"""Trained models outside of a run: exported files, scoring of many rows, and the server."""
