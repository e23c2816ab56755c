"""The random generators of this process: Python's, NumPy's and torch's.

Here: code that draws from them without changing what the rest of the process draws.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the state of all three afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which all three are seeded with `seed`; their states are restored afterwards."""
    with generators_kept():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield
