"""From a run to a file that other programs load, with a proof that both give the same outputs."""
