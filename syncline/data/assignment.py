"""Which samples each rank trains on at each step, until the membership view changes, and what is left then.

Here: pure functions. An `Assignment` covers the part of a run between two membership views. It starts at a position
that all members have reached. It first assigns the requeued samples: those that were assigned before, but whose
gradients were never applied, because their worker failed. Then it follows the run's sample order (`order.py`). Every
worker can compute the samples of every other worker at every step, so nothing is negotiated. After a failure, the
number of applied steps of each worker says exactly which samples to requeue.

    view 1   steps 0..57 of 4 workers; worker 2 fails, and its steps 50..57 were never applied
    view 2   3 workers: first the samples that worker 2 had in steps 50..57, then the order from step 58

Not here: how many steps were applied (`strategies/`), and who is a member (`coordinator/`).

A *range* is (epoch, low, high): positions in the order of that epoch, not indices into the dataset.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from syncline.compute.partition import share

Range = tuple[int, int, int]


@dataclass(frozen=True)
class Position:
    """Where a run is: `cursor` samples of `epoch` are done, after `step` steps in all.

    `extra` of these steps trained on requeued samples; the order did not advance in them.
    """

    epoch: int = 0
    cursor: int = 0
    step: int = 0
    extra: int = 0

    def after(self, samples: int, count: int) -> Position:
        """The position when `samples` more of `count` are done; a finished epoch is the start of the next."""
        cursor = self.cursor + samples
        return (
            Position(self.epoch + 1, 0, self.step + 1, self.extra)
            if cursor >= count
            else Position(self.epoch, cursor, self.step + 1, self.extra)
        )

    def after_requeued(self) -> Position:
        """The position after a step on requeued samples."""
        return Position(self.epoch, self.cursor, self.step + 1, self.extra + 1)


@dataclass(frozen=True)
class AssignedStep:
    """One rank's part of one step: its `ranges`, out of `batch` samples over all ranks, from `position` on."""

    position: Position
    ranges: tuple[Range, ...]
    batch: int
    is_requeued: bool = False
    """Whether these samples were assigned before; the order of the run does not advance."""
    of_all: tuple[Range, ...] = ()
    """The ranges of all ranks together."""

    def after(self, count: int) -> Position:
        """Where the run is when this step is done."""
        return self.position.after_requeued() if self.is_requeued else self.position.after(self.batch, count)


@dataclass(frozen=True)
class Assignment:
    """The samples of `size` ranks from `start` on: `requeued` first, then the order of the run.

    `count` samples an epoch, `batch` in a step, up to epoch `epochs` (None: without end).
    """

    start: Position
    size: int
    count: int
    batch: int
    epochs: int | None = None
    requeued: tuple[Range, ...] = ()

    @cached_property
    def _requeued_steps(self) -> tuple[tuple[Range, ...], ...]:
        """The requeued samples of each step."""
        count = total(self.requeued)
        return tuple(tuple(cut(self.requeued, at, at + self.batch)) for at in range(0, count, self.batch))

    def has_requeued_after(self, step: int) -> bool:
        """Whether requeued samples are left after `step` steps in all."""
        return step - self.start.step < len(self._requeued_steps)

    def at(self, step: int) -> Position:
        """Where the run is when `step` steps in all are done."""
        requeued = min(step - self.start.step, len(self._requeued_steps))
        start = replace(self.start, step=self.start.step + requeued, extra=self.start.extra + requeued)
        steps = step - start.step
        left = -(-(self.count - start.cursor) // self.batch)  # steps of the epoch in which the assignment starts
        if steps < left:
            return replace(start, cursor=start.cursor + steps * self.batch, step=step)
        epochs, steps = divmod(steps - left, -(-self.count // self.batch))
        return replace(start, epoch=start.epoch + 1 + epochs, cursor=steps * self.batch, step=step)

    def step_of(self, step: int, rank: int | None) -> AssignedStep:
        """The part of `rank` in the step that follows `step` steps in all; None has no samples."""
        position, index = self.at(step), step - self.start.step
        is_requeued = index < len(self._requeued_steps)
        if is_requeued:
            ranges = self._requeued_steps[index]
        else:
            ranges = ((position.epoch, position.cursor, min(position.cursor + self.batch, self.count)),)
        batch = total(ranges)
        own = () if rank is None else tuple(cut(ranges, *share(batch, self.size, rank)))
        return AssignedStep(position, own, batch, is_requeued, ranges)

    def steps_of(self, rank: int | None) -> Iterator[AssignedStep]:
        """The part of `rank` in every step, in order."""
        for step in itertools.count(self.start.step):
            assigned = self.step_of(step, rank)
            if not assigned.is_requeued and self.epochs is not None and assigned.position.epoch >= self.epochs:
                return
            yield assigned

    def between(self, rank: int, first: int, last: int) -> tuple[Range, ...]:
        """The ranges of `rank` in the steps from `first` up to, but excluding, `last`."""
        return tuple(r for step in range(max(first, self.start.step), last) for r in self.step_of(step, rank).ranges)

    def next(self, size: int, applied: Mapping[int, int]) -> Assignment:
        """The assignment of the next `size` ranks, if the steps of each rank below `applied[rank]` were applied.

        It starts where the furthest rank was. Samples that were assigned up to there, but not applied, are requeued in
        the order of the run.
        """
        furthest = max([self.start.step, *applied.values()])
        left: list[Range] = []
        for rank in range(self.size):
            left += self.between(rank, applied.get(rank, self.start.step), furthest)
        left += [r for ranges in self._requeued_steps[furthest - self.start.step :] for r in ranges]
        return Assignment(self.at(furthest), size, self.count, self.batch, self.epochs, joined(left))


def total(ranges: Iterable[Range]) -> int:
    """The number of samples in these ranges."""
    return sum(high - low for _, low, high in ranges)


def cut(ranges: Sequence[Range], low: int, high: int) -> Iterator[Range]:
    """The part from the `low`-th sample of these ranges up to, but excluding, the `high`-th."""
    before = 0
    for epoch, first, last in ranges:
        a, b = max(first, first + low - before), min(last, first + high - before)
        if a < b:
            yield epoch, a, b
        before += last - first


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same samples in order, with adjacent ranges merged. Ranges must not overlap."""
    found: list[Range] = []
    for epoch, low, high in sorted(r for r in ranges if r[1] < r[2]):
        if found and found[-1][0] == epoch and found[-1][2] == low:
            found[-1] = (epoch, found[-1][1], high)
        else:
            assert not found or found[-1][0] != epoch or found[-1][2] < low, f"assigned twice: {found[-1]}, {low}"
            found.append((epoch, low, high))
    return tuple(found)
