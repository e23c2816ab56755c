"""Pure mathematics: numbers and tensors in, numbers and tensors out; no processes, no files, no clocks."""
