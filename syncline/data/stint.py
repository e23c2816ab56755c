"""What a set of workers has to do as long as it stays the same, and what is left to do when it changes.

Here: pure functions. A *stint* is the part of a run between two changes of who takes part. It starts at a position that
all have reached, first makes up for samples that were dealt out before but never took effect, and then follows the
order of the run (`order.py`). Every worker can tell from it which samples any worker has at any step, so that nothing
needs negotiating; and when somebody is gone, how many steps of each worker took effect says exactly which samples did.

    stint 1   steps 0..57 of 4 workers        worker 2 is gone; its steps 50..57 never took effect
    stint 2   3 workers: first the samples that worker 2 had in steps 50..57, then on from step 58

Not here: how it is found out what took effect (`strategies/`), and who takes part (`coordinator/`).

A *range* is (epoch, low, high): places in the order of that epoch, not indices into the data set.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from syncline.algorithms.partition import share
from syncline.data.position import Position

__all__ = ["Dealt", "Range", "Stint", "cut", "joined", "total"]

Range = tuple[int, int, int]


@dataclass(frozen=True)
class Dealt:
    """One worker's part of one step: which `ranges`, out of `batch` samples over all workers; the step's start."""

    position: Position
    ranges: tuple[Range, ...]
    batch: int
    makes_up: bool = False
    """Whether these samples were dealt out before; the order of the run does not advance."""

    def after(self, count: int) -> Position:
        """Where the run is when this step is done."""
        return self.position.made_up() if self.makes_up else self.position.after(self.batch, count)


@dataclass(frozen=True)
class Stint:
    """The work of `size` workers from `start` on: `makeup` first, then the order of the run.

    `count` samples an epoch, `batch` in a step, up to epoch `epochs` (None: without end).
    """

    start: Position
    size: int
    count: int
    batch: int
    epochs: int | None = None
    makeup: tuple[Range, ...] = ()

    @cached_property
    def _made_up(self) -> tuple[tuple[Range, ...], ...]:
        """The samples of each step that makes up for earlier ones."""
        count = total(self.makeup)
        return tuple(tuple(cut(self.makeup, at, at + self.batch)) for at in range(0, count, self.batch))

    def makes_up_after(self, step: int) -> bool:
        """Whether there is still something to make up for when `step` steps in all are done."""
        return step - self.start.step < len(self._made_up)

    def at(self, step: int) -> Position:
        """Where the run is when `step` steps in all are done."""
        made_up = min(step - self.start.step, len(self._made_up))
        start = replace(self.start, step=self.start.step + made_up, extra=self.start.extra + made_up)
        steps = step - start.step
        left = -(-(self.count - start.cursor) // self.batch)  # steps of the epoch in which the stint starts
        if steps < left:
            return replace(start, cursor=start.cursor + steps * self.batch, step=step)
        epochs, steps = divmod(steps - left, -(-self.count // self.batch))
        return replace(start, epoch=start.epoch + 1 + epochs, cursor=steps * self.batch, step=step)

    def dealt_at(self, step: int, rank: int) -> Dealt:
        """Worker `rank`'s part of the step that comes when `step` steps in all are done."""
        position, index = self.at(step), step - self.start.step
        makes_up = index < len(self._made_up)
        if makes_up:
            ranges = self._made_up[index]
        else:
            ranges = ((position.epoch, position.cursor, min(position.cursor + self.batch, self.count)),)
        batch = total(ranges)
        return Dealt(position, tuple(cut(ranges, *share(batch, self.size, rank))), batch, makes_up)

    def dealt(self, rank: int) -> Iterator[Dealt]:
        """Worker `rank`'s part of every step, in order."""
        for step in itertools.count(self.start.step):
            dealt = self.dealt_at(step, rank)
            if not dealt.makes_up and self.epochs is not None and dealt.position.epoch >= self.epochs:
                return
            yield dealt

    def between(self, rank: int, first: int, last: int) -> tuple[Range, ...]:
        """What worker `rank` has in the steps from `first` up to, but without, `last`."""
        return tuple(r for step in range(max(first, self.start.step), last) for r in self.dealt_at(step, rank).ranges)

    def next(self, size: int, took_effect: Mapping[int, int]) -> Stint:
        """The stint of `size` workers after this one, if of each worker its steps before `took_effect` did.

        It starts where the furthest was. Whatever had been dealt out up to there and did not take effect is made up
        for, in the order of the run.
        """
        furthest = max([self.start.step, *took_effect.values()])
        left: list[Range] = []
        for rank in range(self.size):
            left += self.between(rank, took_effect.get(rank, self.start.step), furthest)
        left += [r for ranges in self._made_up[furthest - self.start.step :] for r in ranges]
        return Stint(self.at(furthest), size, self.count, self.batch, self.epochs, joined(left))


def total(ranges: Iterable[Range]) -> int:
    """How many samples these are."""
    return sum(high - low for _, low, high in ranges)


def cut(ranges: Sequence[Range], low: int, high: int) -> Iterator[Range]:
    """The part from the `low`-th sample of these ranges up to, but without, the `high`-th."""
    before = 0
    for epoch, first, last in ranges:
        a, b = max(first, first + low - before), min(last, first + high - before)
        if a < b:
            yield epoch, a, b
        before += last - first


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same samples in order, neighbours in one range. Ranges that overlap are not allowed."""
    found: list[Range] = []
    for epoch, low, high in sorted(r for r in ranges if r[1] < r[2]):
        if found and found[-1][0] == epoch and found[-1][2] == low:
            found[-1] = (epoch, found[-1][1], high)
        else:
            assert not found or found[-1][0] != epoch or found[-1][2] < low, f"dealt out twice: {found[-1]}, {low}"
            found.append((epoch, low, high))
    return tuple(found)
