"""Every worker has one place, every part of every replica has a worker, and teams and lanes are what they say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.layouts.grid import Grid, fitted

SMALL = st.integers(1, 4)
GRIDS = st.builds(Grid, SMALL, SMALL, SMALL, SMALL)


@given(GRIDS, st.integers(0, 3))
def test_each_worker_has_a_place_of_its_own_and_the_others_are_spare(grid, spare):
    cells = [grid.cell(rank) for rank in range(grid.workers + spare)]
    assert len(set(cells[: grid.workers])) == grid.workers
    assert None not in cells[: grid.workers]
    assert cells[grid.workers :] == [None] * spare
    assert [grid.share(rank) for rank in range(grid.workers, len(cells))] == [None] * spare


@given(GRIDS)
def test_a_team_has_one_share_and_every_part_of_a_model(grid):
    for share in range(grid.shares):
        team = [rank for rank in range(grid.workers) if grid.share(rank) == share]
        assert sorted(grid.lane(rank) for rank in team) == list(range(grid.per_team))
        assert grid.holders()[share] in team
        assert sum(grid.of_loss(rank) for rank in team) == 1
        cells = [grid.cell(rank) for rank in team]
        assert len({(c.replica, c.shard) for c in cells}) == 1


@given(GRIDS)
def test_a_lane_has_one_worker_of_each_share_with_the_same_part_of_the_model(grid):
    for lane in range(grid.per_team):
        workers = [rank for rank in range(grid.workers) if grid.lane(rank) == lane]
        assert [grid.share(rank) for rank in workers] == list(range(grid.shares))
        assert len({grid.cell(rank)[2:] for rank in workers}) == 1


@given(st.integers(1, 12), st.none() | SMALL, SMALL, SMALL)
def test_any_number_of_workers_has_a_grid_that_wastes_less_than_a_replica(workers, shards, stages, slices):
    grid = fitted(workers, shards=shards, stages=stages, slices=slices)
    assert 1 <= grid.workers <= workers
    assert grid.stages <= stages
    assert grid.slices <= slices
    assert shards is None or grid.shards <= shards
    if workers >= (shards or 1) * stages * slices:
        assert (grid.stages, grid.slices) == (stages, slices)
        assert shards is None or grid.shards == shards
        assert workers - grid.workers < grid.per_replica
