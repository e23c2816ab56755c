"""From the number of a sample to its place in files, and the order that mixes a few groups at a time."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from syncline.data.files.manifest import FileFacts
from syncline.data.files.source import RowAddress, RowMap
from syncline.data.order import Position, SampleOrder, grouped_permutation

files = st.lists(st.lists(st.integers(0, 7), max_size=5), min_size=1, max_size=6).filter(
    lambda sizes: sum(map(sum, sizes)) > 0
)


def layout_of(sizes: list[list[int]], kept: np.ndarray | None = None) -> RowMap:
    return RowMap([FileFacts(f"file-{i}", tuple(groups)) for i, groups in enumerate(sizes)], kept)


def places(sizes: list[list[int]]) -> list[RowAddress]:
    """Every row of every group, in order, written down the simple way."""
    return [
        RowAddress(file, group, row)
        for file, groups in enumerate(sizes)
        for group, rows in enumerate(groups)
        for row in range(rows)
    ]


@given(files)
def test_numbers_and_places_are_one_to_one_in_the_order_of_the_files(sizes: list[list[int]]):
    layout = layout_of(sizes)
    assert [layout.address_of(i) for i in range(len(layout))] == places(sizes)


@given(files, st.data())
def test_with_some_rows_kept_sample_i_is_the_ith_of_these(sizes: list[list[int]], data: st.DataObject):
    all_places = places(sizes)
    kept = sorted(data.draw(st.sets(st.integers(0, len(all_places) - 1), min_size=1)))
    layout = layout_of(sizes, np.asarray(kept))
    assert [layout.address_of(i) for i in range(len(layout))] == [all_places[k] for k in kept]
    assert int(layout.group_sizes.sum()) == len(kept)


@given(files, st.data())
def test_a_batch_is_gathered_from_each_group_once_and_nothing_is_missing(sizes: list[list[int]], data: st.DataObject):
    layout = layout_of(sizes)
    indices = np.asarray(data.draw(st.lists(st.integers(0, len(layout) - 1), max_size=20)), np.int64)
    found: dict[int, RowAddress] = {}
    groups = []
    for file, group, here, rows in layout.by_group(indices):
        groups.append((file, group))
        found |= {int(h): RowAddress(file, group, int(r)) for h, r in zip(here, rows, strict=True)}
    assert len(set(groups)) == len(groups)
    assert [found[i] for i in range(len(indices))] == [layout.address_of(int(i)) for i in indices]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 99), st.integers(0, 9))
def test_mixing_groups_is_a_permutation_that_needs_few_groups_at_a_time(sizes, window, seed, epoch):
    order = grouped_permutation(seed, epoch, np.asarray(sizes), window)
    assert sorted(order.tolist()) == list(range(sum(sizes)))
    ends = np.cumsum(sizes)
    group_of = np.searchsorted(ends, order, side="right")
    last = {int(g): i for i, g in enumerate(group_of)}
    first = {int(g): int(np.argmax(group_of == g)) for g in last}
    for i in range(len(order)):
        assert sum(first[g] <= i <= last[g] for g in last) <= window


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(sum),
    st.integers(1, 4), st.integers(1, 7), st.integers(1, 4), st.data(),
)  # fmt: skip
def test_an_epoch_in_groups_is_every_sample_once_for_any_workers_and_from_any_step(sizes, window, batch, workers, data):
    count = sum(sizes)
    order = SampleOrder(seed=3, count=count, batch=batch, groups=np.asarray(sizes), window=window)
    whole = [s.indices.tolist() for s in order.shares(Position(), rank=0, size=1, epochs=1)]
    at = data.draw(st.integers(0, len(whole) - 1))
    start = Position(0, at * batch, at)
    parts = [[s.indices.tolist() for s in order.shares(start, rank=r, size=workers, epochs=1)] for r in range(workers)]
    together = [list(chain(*step)) for step in zip(*parts, strict=True)]
    assert together == whole[at:]
    assert sorted(chain(*whole)) == list(range(count))
