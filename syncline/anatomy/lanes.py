"""Where connections run that pass by some layers, so that none lies on another.

Here: pure functions of who takes what from whom. Not here: drawing them (`terminal.py`, `svg.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Bypass", "bypasses"]


@dataclass(frozen=True)
class Bypass:
    """A connection from part `start` to part `end`, past those between, on a lane counted from 0."""

    start: int
    end: int
    lane: int


def bypasses(sources: Sequence[Sequence[int]]) -> list[Bypass]:
    """The connections that are not from a part to the next one; short ones lie inside of long ones.

    >>> bypasses([(), (0,), (1,), (1, 2)])
    [Bypass(start=1, end=3, lane=0)]
    """
    wanted = {(start, end) for end, taken in enumerate(sources) for start in taken if start != end - 1}
    found: list[Bypass] = []
    for start, end in sorted(wanted, key=lambda pair: (pair[1] - pair[0], pair)):
        busy = {b.lane for b in found if b.start <= end and start <= b.end}
        lane = next(k for k in range(len(found) + 1) if k not in busy)
        found.append(Bypass(start, end, lane))
    return found
