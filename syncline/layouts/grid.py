"""Which place each worker of a run has, when a replica of the model is spread over several workers.

Here: `Grid` and `WorkerPlace`, pure. A *replica* is one copy of the model. Its workers differ in up to three ways: the
*shard* of the replica's samples that they compute, the pipeline *stage* whose layers they hold, and the *slice* of each
layer. Workers with the same samples are a *team*: they compute one share of a step together. Workers with the same
stage and slice are a *lane*: they hold the same part of the model, and sum its gradients. Not here: what a place means
for a step (`shared_model.py`, `stage_runner.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Cell(NamedTuple):
    """The place of one worker."""

    replica: int
    shard: int
    stage: int
    slice: int


@dataclass(frozen=True)
class Grid:
    """The places of the workers of a View, in the order of their ranks; those of a team follow each other.

    Workers beyond the last place are spare: they hold nothing and compute nothing until the grid grows.
    """

    replicas: int = 1
    shards: int = 1
    stages: int = 1
    slices: int = 1

    @property
    def workers(self) -> int:
        """How many workers have a place."""
        return self.replicas * self.per_replica

    @property
    def per_replica(self) -> int:
        return self.shards * self.per_team

    @property
    def per_team(self) -> int:
        return self.stages * self.slices

    @property
    def shares(self) -> int:
        """Into how many shares the samples of a step are divided."""
        return self.replicas * self.shards

    def cell(self, rank: int) -> Cell | None:
        """The place of `rank`; None if it is spare."""
        if rank >= self.workers:
            return None
        rest, slice_ = divmod(rank, self.slices)
        rest, stage = divmod(rest, self.stages)
        replica, shard = divmod(rest, self.shards)
        return Cell(replica, shard, stage, slice_)

    def share(self, rank: int) -> int | None:
        """The share that `rank` computes with its team; None if it is spare."""
        return rank // self.per_team if rank < self.workers else None

    def lane(self, rank: int) -> int | None:
        """The part of the model that `rank` holds; None if it is spare."""
        return rank % self.per_team if rank < self.workers else None

    def holders(self) -> list[int]:
        """Of each share, the rank that records its samples."""
        return [share * self.per_team for share in range(self.shares)]

    def of_loss(self, rank: int) -> bool:
        """Whether `rank` reports the loss of its share: the first slice of the last stage."""
        return rank < self.workers and rank % self.per_team == (self.stages - 1) * self.slices


@dataclass(frozen=True)
class WorkerPlace:
    """The place of the worker at `rank`; `members` are the workers' ids, in the order of the ranks."""

    grid: Grid
    rank: int
    members: tuple[int, ...]

    @property
    def share(self) -> int | None:
        """Which share of each step it computes; None if it is spare. Workers of a team have the same."""
        return self.grid.share(self.rank)

    @property
    def replica(self) -> int:
        """Which replica it has a part of; spare workers come after them."""
        return self.rank // self.grid.per_replica

    @property
    def is_leader(self) -> bool:
        """Whether it is the first worker of a replica."""
        return self.rank < self.grid.workers and self.rank % self.grid.per_replica == 0

    @property
    def holders(self) -> list[int]:
        """Of each share, the worker_id that records its samples."""
        return [self.members[rank] for rank in self.grid.holders()]


def fitted(workers: int, *, shards: int | None, stages: int, slices: int) -> Grid:
    """The grid for so many workers; `shards` is None if all workers that are left are to be shards of one replica.

    With too few workers for one replica, it has fewer shards, then fewer stages, then fewer slices.
    """
    slices = min(slices, workers)
    stages = min(stages, workers // slices)
    teams = workers // (stages * slices)
    if shards is None:
        return Grid(1, teams, stages, slices)
    shards = min(shards, teams)
    return Grid(teams // shards, shards, stages, slices)
