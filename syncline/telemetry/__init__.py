"""The events of a run and its directory: the only interface between a run and the views, reports and benchmarks."""
