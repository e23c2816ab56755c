"""Synchronization strategies."""
