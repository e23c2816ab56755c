"""How the members of a new View find out from where to go on.

Here: what each member says when it enters (`Standing`), and the pure function that all of them evaluate alike
(`agree`). Not here: how state travels (`course.py`), what a strategy holds (`strategies/`), who the members are
(`coordinator/membership.py`). The three ways are those of `strategies.exchange.Recovery`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from syncline.data.position import Position
from syncline.data.stint import Range, Stint
from syncline.strategies.exchange import Recovery

__all__ = ["Agreement", "Standing", "agree", "decode", "encode"]


class Standing(msgspec.Struct, frozen=True):
    """What one member brings along."""

    number: int
    """Its number in the run."""
    view: int = 0
    """The last View in which it has stood; 0 for one that has nothing yet."""
    step: int = 0
    """How many steps it has done."""
    recovery: Recovery = "saved"
    start: tuple[int, int, int, int] = (0, 0, 0, 0)
    size: int = 1
    makeup: tuple[Range, ...] = ()
    """The stint that it was in: its start, how many workers there were, what was to be made up for."""
    effects: dict[int, int] = {}
    """Of which worker of that stint, by rank, how many steps are in what this one holds."""

    @classmethod
    def of(
        cls, number: int, view: int, step: int, stint: Stint, recovery: Recovery, effects: dict[int, int]
    ) -> Standing:
        """The standing of a worker that has done `step` steps in `stint`."""
        start = (stint.start.epoch, stint.start.cursor, stint.start.step, stint.start.extra)
        return cls(number, view, step, recovery, start, stint.size, stint.makeup, effects)


class Agreement(NamedTuple):
    """From where all go on in place."""

    giver: int
    """The rank whose state is given to those who need it."""
    needy: tuple[int, ...]
    """The ranks that need it."""
    holders: tuple[int, ...]
    """The ranks that have something."""
    merges: bool
    """Whether the holders bring together what they have."""
    stint: Stint
    """What is to be done."""


def agree(standings: Sequence[Standing], *, count: int, batch: int, epochs: int | None) -> Agreement | None:
    """What follows from the standings of all members, in the order of their ranks. None: go on from what is saved."""
    latest = max(s.view for s in standings)
    # Who missed a View in between has nothing that the others do not have.
    holders = tuple(rank for rank, s in enumerate(standings) if s.view == latest and latest > 0)
    ways = {standings[rank].recovery for rank in holders}
    # A loop of the user's own may leave an epoch before its end: then some have done so, and others not yet.
    stints = {(s.start, s.size, s.makeup) for s in (standings[rank] for rank in holders)}
    if ways not in ({"equal"}, {"merge"}) or len(stints) > 1:
        return None
    merges = ways == {"merge"}
    giver = max(holders, key=lambda rank: (standings[rank].step, -rank))
    best = standings[giver]
    before = Stint(Position(*best.start), best.size, count, batch, epochs, best.makeup)
    if merges:
        needy = tuple(rank for rank in range(len(standings)) if rank not in holders)
        effects = {
            worker: max(standings[rank].effects.get(worker, before.start.step) for rank in holders)
            for worker in range(best.size)
        }
    else:
        # Nobody's step is done before everybody's is: what the furthest has done, all have, also those who are gone.
        needy = tuple(rank for rank, s in enumerate(standings) if rank not in holders or s.step != best.step)
        effects = dict.fromkeys(range(best.size), best.step)
    return Agreement(giver, needy, holders, merges, before.next(len(standings), effects))


def encode(standing: Standing) -> bytes:
    """For the others."""
    return msgspec.msgpack.encode(standing)


def decode(data: bytes) -> Standing:
    """What `encode` made."""
    return msgspec.msgpack.decode(data, type=Standing)
