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

from syncline.data.position import Position
from syncline.data.stint import Range, Stint

__all__ = ["Position", "SampleOrder", "Share", "grouped_permutation", "hold_out", "permutation", "step_seed"]

_HELD_OUT = 0x48454C44
"""Sets the stream that chooses what is held out apart from those of the epochs."""

_GROUPED = 0x47525053
"""Likewise for the streams that mix some groups at a time."""


@dataclass(frozen=True)
class Share:
    """One worker's samples of one step: `indices` into the data set, out of `batch` samples over all workers."""

    position: Position
    indices: np.ndarray
    batch: int
    ranges: tuple[Range, ...]
    """The same samples, as places in the order."""
    after: Position
    """Where the run is when the step is done."""

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


def grouped_permutation(seed: int, epoch: int, sizes: np.ndarray, window: int) -> np.ndarray:
    """The order of samples in one epoch if they lie in groups of these `sizes`, and `window` groups are mixed at once.

    The groups come in random order, and the samples of each `window` of them are shuffled together. Whoever goes
    through the order needs no more than `window` groups at hand, and each of them once.
    """
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch, _GROUPED])))
    ends = np.cumsum(sizes)
    groups = random.permutation(len(sizes))
    order = [np.empty(0, np.int64)]
    for at in range(0, len(groups), window):
        samples = np.concatenate([np.arange(ends[g] - sizes[g], ends[g]) for g in groups[at : at + window]])
        order.append(samples[random.permutation(len(samples))])
    return np.concatenate(order)


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
    groups: np.ndarray | None = field(default=None, compare=False)
    """How many samples of the data set lie in each group, if only `window` groups are to be mixed at a time."""
    window: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """How many steps one epoch has, the last partial one included."""
        return -(-self.count // self.batch)

    def shares(self, start: Position, *, rank: int, size: int, epochs: int | None = None) -> Iterator[Share]:
        """Worker `rank`'s part of every step from `start` to the end of epoch `epochs` (None: without end)."""
        return self.shares_of(Stint(start, size, self.count, self.batch, epochs), rank)

    def shares_of(self, stint: Stint, rank: int) -> Iterator[Share]:
        """Worker `rank`'s part of every step of a stint."""
        orders: dict[int, np.ndarray] = {}
        for dealt in stint.dealt(rank):
            needed = {epoch for epoch, _, _ in dealt.ranges} | {dealt.position.epoch}
            orders = {epoch: orders[epoch] if epoch in orders else self._order(epoch) for epoch in needed}
            parts = [orders[epoch][low:high] for epoch, low, high in dealt.ranges]
            indices = parts[0] if len(parts) == 1 else np.concatenate([orders[dealt.position.epoch][:0], *parts])
            yield Share(dealt.position, indices, dealt.batch, dealt.ranges, dealt.after(self.count))

    def _order(self, epoch: int) -> np.ndarray:
        if self.shuffle and self.groups is not None:
            grouped = grouped_permutation(self.seed, epoch, self.groups, self.window)
            return grouped if self.kept is None else grouped[np.isin(grouped, self.kept)]
        order = permutation(self.seed, epoch, self.count) if self.shuffle else np.arange(self.count)
        return order if self.kept is None else self.kept[order]
