"""Scoring tables of any size with a trained model: resumable, with every row exactly once."""
