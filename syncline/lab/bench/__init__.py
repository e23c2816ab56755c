"""Measuring Syncline against what people would use instead, side by side on the same machine."""
