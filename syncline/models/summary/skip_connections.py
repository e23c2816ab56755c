"""Layout of skip connections, so that none overlaps another.

Here: pure functions of the connections. Not here: drawing them (`terminal.py`, `svg.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SkipConnection:
    """A connection from part `start` to part `end`, past those between, on a lane counted from 0."""

    start: int
    end: int
    lane: int


def skip_connections(sources: Sequence[Sequence[int]]) -> list[SkipConnection]:
    """The connections that skip layers; short ones are inside long ones.

    >>> skip_connections([(), (0,), (1,), (1, 2)])
    [SkipConnection(start=1, end=3, lane=0)]
    """
    wanted = {(start, end) for end, taken in enumerate(sources) for start in taken if start != end - 1}
    found: list[SkipConnection] = []
    for start, end in sorted(wanted, key=lambda pair: (pair[1] - pair[0], pair)):
        busy = {b.lane for b in found if b.start <= end and start <= b.end}
        lane = next(k for k in range(len(found) + 1) if k not in busy)
        found.append(SkipConnection(start, end, lane))
    return found
