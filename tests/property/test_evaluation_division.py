"""An evaluation that is divided among workers: every sample once, whichever of them fail, and when."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from syncline.data.stream import batches_of
from syncline.workers.own_loop.division import Division


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 6), st.booleans())
def test_batches_have_all_samples_and_none_is_smaller_than_the_number_of_workers(count, batch, workers, drop_last):
    batches = list(batches_of(iter(range(count)), batch, workers, drop_last=drop_last))
    used = count - count % batch if drop_last else count
    assert [n for found in batches for n in found] == list(range(used))
    assert all(len(found) >= min(batch, workers) for found in batches) or len(batches) == 1


@given(st.integers(1, 5), st.integers(0, 6), st.data())
def test_every_part_is_evaluated_once_by_a_worker_that_is_left(workers, batches, data):
    members = list(range(workers))
    division: Division | None = Division(members)
    results: list[tuple[int, int, int]] = []
    while division is not None:
        for batch in range(batches):
            for part in range(workers):
                results += [(owner, batch, part) for owner in members if division.is_due(batch, part, owner)]
        members = sorted(data.draw(st.sets(st.sampled_from(members), min_size=1)))
        division = division.after_failures(members)
    counted = Counter((batch, part) for owner, batch, part in results if owner in members)
    assert counted == Counter((batch, part) for batch in range(batches) for part in range(workers))
