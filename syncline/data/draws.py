"""Random numbers that belong to a sample, not to whoever happens to read it.

Here: `uniform`, a pure function of the run's seed, the epoch, the sample and what the number is for. Counter-based: no
state goes from one sample to the next, so neither the number of workers nor a resumed run changes anything. The mixing
is that of SplitMix64. (G. L. Steele, D. Lea and C. H. Flood, "Fast Splittable Pseudorandom Number Generators", 2014.)
"""

from __future__ import annotations

import numpy as np

__all__ = ["uniform"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seed: int, epochs: np.ndarray, indices: np.ndarray, purpose: int) -> np.ndarray:
    """One float64 in [0, 1) for each sample (epochs[i], indices[i]); `purpose` tells several draws apart."""
    state = np.full(len(indices), seed, np.uint64)
    for word in (epochs, indices, np.full(len(indices), purpose)):
        state = _mixed(state + _GOLDEN + word.astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed
