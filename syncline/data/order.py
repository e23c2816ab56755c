"""In which order samples are used, and where a run is in it.

Here: pure functions of (seed, epoch) and a position that is one global cursor. Neither the order nor the contents of
a step depend on how many workers there are: step t always holds the same samples, split among whoever is there.
Not here: fetching the samples (`source.py`, `prefetch.py`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from syncline.algorithms.partition import share

__all__ = ["Position", "SampleOrder", "Share", "hold_out", "permutation", "step_seed"]

_HELD_OUT = 0x48454C44
"""Sets the stream that chooses what is held out apart from those of the epochs."""


@dataclass(frozen=True)
class Position:
    """Where a run is: `cursor` samples of `epoch` are done, after `step` steps in all."""

    epoch: int = 0
    cursor: int = 0
    step: int = 0

    def after(self, samples: int, count: int) -> Position:
        """The position when `samples` more of `count` are done; a finished epoch is the start of the next."""
        cursor = self.cursor + samples
        return (
            Position(self.epoch + 1, 0, self.step + 1)
            if cursor >= count
            else Position(self.epoch, cursor, self.step + 1)
        )


@dataclass(frozen=True)
class Share:
    """One worker's samples of one step: `indices` into the data set, out of `batch` samples over all workers."""

    position: Position
    indices: np.ndarray
    batch: int

    @property
    def weight(self) -> float:
        """What part of the step's samples this is: the weight of this worker's mean gradient in the global mean."""
        return len(self.indices) / self.batch


def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of `count` samples in one epoch.

    NumPy freezes the streams of SeedSequence, MT19937 and RandomState for good, but not those of its newer
    Generator; a run that is resumed years later must still find the same order.
    """
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(bits).permutation(count)


def hold_out(seed: int, count: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples to train on and the `number` of samples held out, drawn at random, both in ascending order."""
    order = permutation(seed, _HELD_OUT, count)
    return np.sort(order[number:]), np.sort(order[:number])


def step_seed(seed: int, step: int, rank: int) -> int:
    """The seed of everything random in one worker's step (dropout, say): resuming needs no generator state."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, step, rank), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The steps of a run: `count` samples an epoch in batches of `batch`, the last one of an epoch as it comes out."""

    seed: int
    count: int
    batch: int
    shuffle: bool = True
    kept: np.ndarray | None = field(default=None, compare=False)
    """Which samples of the data set are used, if not all of them; `count` is how many these are."""

    @property
    def steps_per_epoch(self) -> int:
        """How many steps one epoch has, the last partial one included."""
        return -(-self.count // self.batch)

    def shares(self, start: Position, *, rank: int, size: int, epochs: int | None = None) -> Iterator[Share]:
        """Worker `rank`'s part of every step from `start` to the end of epoch `epochs` (None: without end)."""
        position = start
        while epochs is None or position.epoch < epochs:
            epoch = position.epoch
            order = permutation(self.seed, epoch, self.count) if self.shuffle else np.arange(self.count)
            order = order if self.kept is None else self.kept[order]
            while position.epoch == epoch:
                indices = order[position.cursor : position.cursor + self.batch]
                low, high = share(len(indices), size, rank)
                yield Share(position, indices[low:high], len(indices))
                position = position.after(len(indices), self.count)
