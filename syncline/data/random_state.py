"""The random generators of this process: Python's, NumPy's and torch's.

Here: seeding them, and code that draws from them without changing what the rest of the process draws.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class GeneratorStates:
    """The states of all three; equal if nothing was drawn in between."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()

    @classmethod
    def now(cls) -> GeneratorStates:
        return cls()

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GeneratorStates):
            return NotImplemented
        (_, keys, *places), (_, other_keys, *other_places) = self._numpy, other._numpy
        return (
            places == other_places
            and torch.equal(self._torch, other._torch)
            and self._python == other._python
            and np.array_equal(keys, other_keys)
        )

    __hash__ = None  # type: ignore[assignment]


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the state of all three afterwards."""
    states = GeneratorStates.now()
    try:
        yield
    finally:
        states.restore()


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
