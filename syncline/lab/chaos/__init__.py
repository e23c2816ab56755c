"""Fault injection into whole runs, and the score of how they recover."""
