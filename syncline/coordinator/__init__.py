"""The control plane of a run, in the driver's process: membership, failure detection and recovery decisions."""
