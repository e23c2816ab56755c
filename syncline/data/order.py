"""The order of samples in each epoch.

Here: pure functions of (seed, epoch), and a worker's share of each step as indices into the dataset. Neither the
order nor the samples of a step depend on the number of workers: step t always holds the same samples, split among the
current members. Not here: which range of the order a worker gets (`assignment.py`), fetching (`source.py`,
`prefetch.py`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from syncline.data.assignment import Assignment, Position, Range

_HELD_OUT = 0x48454C44
"""Keeps the random stream of the held-out split apart from those of the epochs."""

_GROUPED = 0x47525053
"""Likewise for the streams that shuffle a window of groups."""

HOLE = -1
"""In place of a sample's index: nothing is there. Batches that are smaller than others are filled up with these."""


@dataclass(frozen=True)
class Share:
    """One worker's samples of one step: `indices` into the dataset, out of `batch` samples over all workers."""

    position: Position
    indices: np.ndarray
    batch: int
    ranges: tuple[Range, ...]
    """The same samples, as positions in the order."""
    after: Position
    """The position of the run after the step."""
    of_all: tuple[Range, ...] = ()
    """The samples of all workers in this step, as positions in the order."""
    checksum: int = 0
    """Of the samples of all workers, as this worker has read them; 0 if they are read by index."""

    @property
    def weight(self) -> float:
        """The fraction of the step's samples: the weight of this worker's mean gradient in the global mean."""
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

    The groups come in random order, and the samples of each `window` of them are shuffled together. A reader that
    follows the order holds at most `window` groups in memory, and reads each group once.
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
    """The seed of all randomness in one worker's step, such as dropout, so that resuming needs no generator state."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, step, rank), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The steps of a run: `count` samples per epoch in batches of `batch`; an epoch's last batch may be smaller."""

    seed: int
    count: int
    batch: int
    shuffle: bool = True
    kept: np.ndarray | None = field(default=None, compare=False)
    """The indices of the samples in use, if not all are; `count` is their number."""
    groups: np.ndarray | None = field(default=None, compare=False)
    """The number of samples in each group, if only `window` groups are shuffled together."""
    window: int = 1
    is_counted: bool = True
    """Whether the ledger counts the samples; False for steps without samples."""
    draw: Callable[[int], np.ndarray] | None = field(default=None, compare=False)
    """The indices of an epoch in order, if the user's own sampler decides; they may include `HOLE`."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch, including the last partial one."""
        return -(-self.count // self.batch)

    def shares(self, start: Position, *, rank: int, size: int, epochs: int | None = None) -> Iterator[Share]:
        """The share of `rank` in every step from `start` to the end of epoch `epochs` (None: without end)."""
        return self.shares_of(Assignment(start, size, self.count, self.batch, epochs), rank)

    def shares_of(self, assignment: Assignment, rank: int | None) -> Iterator[Share]:
        """The share of `rank` in every step of an assignment; None has empty shares."""
        orders: dict[int, np.ndarray] = {}
        for assigned in assignment.steps_of(rank):
            needed = {epoch for epoch, _, _ in assigned.of_all} | {assigned.position.epoch}
            orders = {epoch: orders[epoch] if epoch in orders else self._order(epoch) for epoch in needed}
            indices, batch = _samples_in(assigned.ranges, orders, assigned.position.epoch), assigned.batch
            if self.draw is not None:
                indices = indices[indices != HOLE]
                batch = int((_samples_in(assigned.of_all, orders, assigned.position.epoch) != HOLE).sum())
            yield Share(assigned.position, indices, batch, assigned.ranges, assigned.after(self.count), assigned.of_all)

    def _order(self, epoch: int) -> np.ndarray:
        if self.draw is not None:
            return self.draw(epoch)
        if self.shuffle and self.groups is not None:
            grouped = grouped_permutation(self.seed, epoch, self.groups, self.window)
            return grouped if self.kept is None else grouped[np.isin(grouped, self.kept)]
        order = permutation(self.seed, epoch, self.count) if self.shuffle else np.arange(self.count)
        return order if self.kept is None else self.kept[order]


def _samples_in(ranges: tuple[Range, ...], orders: dict[int, np.ndarray], epoch: int) -> np.ndarray:
    """The indices in these ranges; `epoch` gives the type of none at all."""
    parts = [orders[of_epoch][low:high] for of_epoch, low, high in ranges]
    return parts[0] if len(parts) == 1 else np.concatenate([orders[epoch][:0], *parts])
