"""The random generators of this process: Python's, NumPy's and torch's.

Here: seeding them, and code that draws from them without changing what the rest of the process draws.
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


def seed_torch(seed: int) -> None:
    """As `torch.manual_seed`, which takes 0.2 ms: too long for each sample."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which all three are seeded with `seed`; their states are restored afterwards."""
    with generators_kept():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        seed_torch(seed)
        yield
