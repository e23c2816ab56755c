"""What one process computes with: kernels, tuning, memory, batch norm, recomputation."""
