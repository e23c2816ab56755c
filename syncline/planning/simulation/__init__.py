"""Runs simulated instead of run: any strategy, thousands of workers, stragglers and failures."""
