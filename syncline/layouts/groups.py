"""The collectives of the groups that a worker belongs to.

Here: `groups_of`, and `replica_groups_of` where nothing is summed over replicas. Not here: who belongs to which
(`grid.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from syncline.comms.collective import Collective
from syncline.layouts.grid import Grid


class Groups(NamedTuple):
    """A worker's replica, its lane and its team; spare workers are among themselves."""

    replica: Collective
    lane: Collective
    team: Collective


def groups_of(collective: Collective, grid: Grid) -> Groups:
    """The groups of this rank of `collective`; all ranks call this together."""
    rank, cell = collective.rank, grid.cell(collective.rank)

    def group(place: int | None, count: int) -> Collective:
        is_all = count == 1 and grid.workers == collective.size
        return collective if is_all else collective.split(count if place is None else place)

    return Groups(
        group(None if cell is None else cell.replica, grid.replicas),
        group(grid.lane(rank), grid.per_team),
        group(grid.share(rank), grid.shares),
    )


def replica_groups_of(collective: Collective, grid: Grid) -> Groups:
    """As `groups_of`, but each lane has only the workers of one replica."""
    rank, cell = collective.rank, grid.cell(collective.rank)
    lane = grid.workers if cell is None else cell.replica * grid.per_team + rank % grid.per_team
    return Groups(
        collective.split(grid.replicas if cell is None else cell.replica),
        collective.split(lane),
        collective.split(grid.shares if cell is None else rank // grid.per_team),
    )
